"""The page's side of a benchmark (web/benchmark.js) in Node.js, on a stand-in for ComfyUI's api."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

WEB = Path(__file__).resolve().parents[2] / "web"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="there is no Node.js")

APP = """
export const app = { graph: { id: "g" }, graphToPrompt: async () => ({ output: {}, workflow: {} }) };
"""
#: ComfyUI's api, whose answers are ``answers``: path -> what it answers now; ``asked``: the paths so far.
API = """
export const asked = [];
export const answers = {};
class Api extends EventTarget {
  clientId = "page";
  async fetchApi(path, options) {
    asked.push(path);
    if (!(path in answers)) throw new TypeError("fetch failed");
    const found = await answers[path](JSON.parse(options?.body ?? "null"));
    return { ok: !found.error, status: found.error ? 400 : 200, json: async () => found };
  }
}
export const api = new Api();
"""
#: A benchmark of one trial with one prompt, whose end no event says.
PAGE = """
import { api, answers, asked } from "../../scripts/api.js";
import { benchmark, Stop } from "./benchmark.js";

const stop = new Stop();
const queue = { queue_running: [[1, "p"]], queue_pending: [] };
const history = {};
answers["/parallel_dit/trials"] = () => ({ trials: [{ name: "t", prompts: [{}] }] });
answers["/parallel_dit/status"] = () => ({ last_run: { prompt: "p", seconds: 2 } });
answers["/prompt"] = () => ({ prompt_id: "p" });
answers["/queue"] = () => queue;
answers["/history/p"] = () => history;
const every = globalThis.setInterval;
globalThis.setInterval = (call) => every(call, LOOK);

async function run() {
  const said = [];
  for await (const each of benchmark(stop)) said.push({ ...each, plan: undefined, trial: undefined });
  return said;
}

CASE
"""


def page(folder: Path, case: str, look: int = 20):
    """Run a page's script; return the JSON that it prints last. ``look``: milliseconds of an interval."""
    scripts = folder / "scripts"
    pack = folder / "extensions" / "pack"
    for each in (scripts, pack):
        each.mkdir(parents=True)
    (folder / "package.json").write_text('{"type": "module"}')
    (scripts / "app.js").write_text(APP)
    (scripts / "api.js").write_text(API)
    shutil.copy(WEB / "benchmark.js", pack)
    (pack / "page.js").write_text(PAGE.replace("LOOK", str(look)).replace("CASE", case))
    assert NODE is not None
    command = [NODE, str(pack / "page.js")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


#: What ComfyUI's history says of a prompt -> what the benchmark makes of it.
ENDS = {
    "success": ('{ status: { completed: true, messages: [["execution_success", {}]] } }', {"seconds": 2}),
    "success, without messages": ("{ status: { completed: true } }", {"seconds": 2}),
    "error": (
        '{ status: { messages: [["execution_error", { exception_message: "no" }]] } }',
        {"error": "no"},
    ),
    "interrupted": ('{ status: { messages: [["execution_interrupted", {}]] } }', None),
    "deleted": ("undefined", None),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("by", ["look", "reconnected"])
def test_an_end_that_no_event_says_is_found(tmp_path, end, by):
    """As while the page reconnects: the panel waited for ever. ComfyUI may not answer meanwhile."""
    status, found = ENDS[end]
    case = f"""
      const result = run();
      await new Promise((resolve) => setTimeout(resolve, 100));
      const answer = answers["/queue"];
      delete answers["/queue"];
      await new Promise((resolve) => setTimeout(resolve, 100));
      answers["/queue"] = answer;
      queue.queue_running = [];
      history.p = {status};
      if ("{by}" === "reconnected") api.dispatchEvent(new Event("reconnected"));
      console.log(JSON.stringify(await result));
      process.exit(0);
    """
    said = page(tmp_path, case, 20 if by == "look" else 10**6)
    assert said[2:] == ([{"index": 0, "of": 1, **found}] if found else [])


def test_an_event_says_it_without_a_question(tmp_path):
    case = """
      const result = run();
      await new Promise((resolve) => setTimeout(resolve, 100));
      api.dispatchEvent(Object.assign(new Event("execution_success"), { detail: { prompt_id: "p" } }));
      console.log(JSON.stringify([await result, asked]));
      process.exit(0);
    """
    said, asked = page(tmp_path, case, 10**6)
    assert said[2:] == [{"index": 0, "of": 1, "seconds": 2}] and "/queue" not in asked


def test_stop_ends_the_question_too(tmp_path):
    """It did nothing while the machine was measured."""
    case = """
      let end;
      let name;
      answers["/parallel_dit/trials"] = ({ benchmark }) => {
        name = benchmark;
        return new Promise((resolve) => (end = resolve));
      };
      answers["/parallel_dit/stop_trials"] = ({ benchmark }) => {
        if (benchmark === name) end({ error: "the benchmark was stopped." });
        return { stopped: true };
      };
      const result = run();
      await new Promise((resolve) => setTimeout(resolve, 50));
      await stop.now();
      console.log(JSON.stringify([await result, asked]));
      process.exit(0);
    """
    assert page(tmp_path, case) == [[], ["/parallel_dit/trials", "/parallel_dit/stop_trials"]]
