// The sidebar tab "Parallel DiT": backends, ranks, the running request as a timeline, the last error, actions.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { apply, ask, benchmark, refusal, Stop } from "./benchmark.js";

const POLL_MS = 1000;
const STYLE = `
.pdit { padding: 10px; font-size: 12px; line-height: 1.45; overflow-y: auto; height: 100%; box-sizing: border-box; }
.pdit h3 { font-size: 13px; margin: 12px 0 4px; font-weight: 600; }
.pdit h3:first-child { margin-top: 0; }
.pdit .muted { opacity: 0.7; }
.pdit .rank { margin: 6px 0; }
.pdit .line { position: relative; height: 14px; background: rgba(128,128,128,.18); border-radius: 3px; overflow: hidden; }
.pdit .step { position: absolute; top: 0; bottom: 0; background: #4a9d7a; border-right: 1px solid rgba(0,0,0,.45); box-sizing: border-box; }
.pdit .wait { position: absolute; top: 0; bottom: 0; right: 0; background: #d08a3c; }
.pdit .key { display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin: 0 4px 0 8px; }
.pdit .buttons { display: flex; flex-wrap: wrap; gap: 6px; margin: 10px 0; }
.pdit button { padding: 4px 8px; border: 1px solid rgba(128,128,128,.5); border-radius: 4px; background: rgba(128,128,128,.15); color: inherit; cursor: pointer; }
.pdit button:disabled { opacity: 0.45; cursor: default; }
.pdit pre { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 220px; overflow: auto; background: rgba(128,128,128,.12); padding: 6px; font-size: 11px; margin: 4px 0; }
.pdit .error { color: #b52b27; overflow-wrap: anywhere; }
.dark-theme .pdit .error { color: #ff7b76; }
.pdit .past { opacity: 0.6; }
.pdit .past .error, .dark-theme .pdit .past .error { color: inherit; }
.pdit table { border-collapse: collapse; width: 100%; }
.pdit caption { caption-side: bottom; text-align: left; padding: 4px 0; }
.pdit td { padding: 2px 4px; border-top: 1px solid rgba(128,128,128,.3); vertical-align: top; }`;

// An element with a class and text; text is never HTML.
function element(tag, className = "", text = "", ...children) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  made.append(...children);
  return made;
}

function size(bytes) {
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

function time(seconds) {
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  return seconds < 90 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds / 60)} min`;
}

// [request, step, begin, seconds, waited, sent] of the newest request
function newest(ranks) {
  const request = Math.max(0, ...ranks.flatMap(({ steps }) => (steps ?? []).map((step) => step[0])));
  return ranks.map(({ steps }) => (steps ?? []).filter((step) => step[0] === request));
}

function stepTitle([, step, , seconds, waited, sent]) {
  return `step ${step + 1}: ${time(seconds)}, of it ${time(waited)} waiting, ${size(sent)} sent`;
}

function timeline(steps, begin, end) {
  const line = element("div", "line");
  const percent = (seconds) => `${(100 * seconds) / Math.max(end - begin, 1e-9)}%`;
  for (const step of steps) {
    const bar = element("div", "step");
    bar.style.left = percent(step[2] - begin);
    bar.style.width = percent(step[3]);
    bar.title = stepTitle(step);
    const wait = element("div", "wait");
    wait.style.width = `${Math.min(100, (100 * step[4]) / Math.max(step[3], 1e-9))}%`;
    bar.append(wait);
    line.append(bar);
  }
  return line;
}

function rankText(rank, device) {
  const where = rank.gpu === undefined ? `rank ${rank.rank} (${device})` : `GPU ${rank.gpu} ${rank.name}`;
  const memory =
    rank.total_bytes === undefined
      ? `process ${size(rank.resident_bytes)}`
      : `${size(rank.total_bytes - rank.free_bytes)} of ${size(rank.total_bytes)} used`;
  return `${where} · ${rank.state} · weights ${size(rank.weight_bytes ?? 0)} · ${memory}`;
}

function stepsText(steps) {
  const sum = (index) => steps.reduce((total, step) => total + step[index], 0);
  const waited = Math.round((100 * sum(4)) / Math.max(sum(3), 1e-9));
  return `${steps.length} steps, ${time(sum(3) / steps.length)} each, ${waited}% waiting, ${size(sum(5) / steps.length)} sent a step`;
}

function backendView(backend) {
  const view = element("div", "backend");
  view.append(element("h3", "", `${backend.ours ? "Ranks" : `Backend at ${backend.address}`}: ${backend.what}`));
  if (backend.problem) {
    view.append(element("div", "error", backend.problem));
    return view;
  }
  const queued = backend.waiting ? `, ${backend.waiting} more in the queue` : "";
  const running = backend.running
    ? `${backend.running} for ${time(backend.running_seconds)}${queued}`
    : `ready, up for ${time(backend.up_seconds)}`;
  const models = backend.models.join(", ") || "no model loaded";
  view.append(element("div", "muted", `${running} · ${models}`));
  const ofRanks = newest(backend.ranks);
  const all = ofRanks.flat();
  const begin = Math.min(...all.map((step) => step[2]));
  const end = Math.max(...all.map((step) => step[2] + step[3]));
  backend.ranks.forEach((rank, index) => {
    const row = element("div", "rank", "", element("div", "", rankText(rank, backend.device)));
    if (ofRanks[index].length) {
      row.append(timeline(ofRanks[index], begin, end), element("div", "muted", stepsText(ofRanks[index])));
    }
    view.append(row);
  });
  if (all.length) view.append(legend(backend, end - begin));
  return view;
}

function legend(backend, seconds) {
  const compute = element("span", "key");
  compute.style.background = "#4a9d7a";
  const wait = element("span", "key");
  wait.style.background = "#d08a3c";
  const hosts = backend.device === "cuda" ? " (as the hosts see it: GPUs work behind them)" : "";
  const what = `${backend.running ? "running" : "last"} request, ${time(seconds)}${hosts}`;
  return element("div", "muted", what, compute, "compute", wait, "waiting for other ranks");
}

class Panel {
  constructor() {
    this.stop = null; // of the benchmark that runs
    this.busy = false;
    this.facts = element("div");
    this.error = element("div");
    this.shownError = 0;
    this.isRunning = false;
    this.message = element("div", "muted pdit-message");
    this.message.setAttribute("role", "status"); // screen readers say it
    this.results = element("table");
    this.log = element("pre");
    this.log.hidden = true;
    this.buttons = element("div", "buttons", "", ...this.makeButtons());
    const shown = [this.buttons, this.message, this.results, this.log, this.facts, this.error];
    this.body = element("div", "pdit", "", ...shown);
  }

  makeButtons() {
    const button = (name, tip, act) => {
      const made = element("button", `pdit-${name.split(" ")[0].toLowerCase()}`, name);
      made.title = tip;
      made.addEventListener("click", () => this.try(act));
      return made;
    };
    this.benchmarkButton = button("Benchmark this graph", "Tries ways to share the work and writes the best into Parallel Config", () =>
      this.benchmark(),
    );
    return [
      button("Free weights", "Takes all models off the ranks, which stay", async () => {
        const { freed } = await ask("free", {});
        return freed ? `freed the weights of ${freed} model${freed > 1 ? "s" : ""}` : "nothing to free, or a request runs";
      }),
      button("Stop ranks", "Ends all ranks, and what runs on them", async () => {
        if (this.isRunning && !confirm("The ranks work, or a graph that needs them runs. End both?")) return null;
        await ask("stop", {});
        return "the ranks have ended; the next run starts new ones";
      }),
      button("Open log", "The log of the ranks", () => this.openLog()),
      this.benchmarkButton,
    ];
  }

  async try(act) {
    try {
      const text = await act();
      if (text !== null) this.message.textContent = text ?? "";
      this.message.classList.remove("error");
    } catch (error) {
      this.message.textContent = error.message;
      this.message.classList.add("error");
    }
    this.poll();
  }

  async openLog() {
    this.log.hidden = !this.log.hidden;
    if (this.log.hidden) return "";
    const response = await api.fetchApi("/parallel_dit/log");
    if (!response.ok) throw new Error(refusal(response.status));
    const text = await response.text();
    this.log.textContent = text || "no log: no ranks have run, or they ended as they were asked to";
    this.log.scrollTop = this.log.scrollHeight;
    return "";
  }

  async benchmark() {
    if (this.stop) {
      this.message.textContent = "stopping";
      await this.stop.now();
      return null; // the benchmark itself says how it ended
    }
    this.stop = new Stop();
    this.benchmarkButton.textContent = "Stop the benchmark";
    this.results.replaceChildren();
    try {
      return await this.runBenchmark(this.stop);
    } finally {
      this.stop = null;
      this.benchmarkButton.textContent = "Benchmark this graph";
    }
  }

  async runBenchmark(stop) {
    this.message.textContent = "looking at the model and this machine";
    let plan = null;
    const measured = [];
    const cells = []; // [result, its cell]
    for await (const each of benchmark(stop)) {
      plan ??= each.plan;
      if (!each.trial) continue;
      const isDone = each.seconds !== undefined || each.error;
      this.message.textContent = `${each.index + 1} of ${each.of}: ${each.trial.name}`;
      if (!isDone) continue;
      const cell = element("td", "", each.error ?? time(each.seconds));
      this.results.append(element("tr", "", "", element("td", "", each.trial.name), cell));
      if (!Number.isFinite(each.seconds)) continue;
      measured.push(each);
      cells.push([each, cell]);
    }
    const one = measured.find(({ trial }) => trial.ranks === 1); // the last one
    const factor = (each) => (one && each !== one ? `, ${(one.seconds / each.seconds).toFixed(1)}x ${one.trial.name}` : "");
    for (const [each, cell] of cells) cell.textContent += factor(each);
    if (!measured.length) return stop.isStopped ? "stopped" : "nothing was measured";
    if (stop.isStopped) return "stopped; Parallel Config is as it was";
    measured.sort((a, b) => a.seconds - b.seconds);
    const best = `best: ${measured[0].trial.name}, ${time(measured[0].seconds)}${factor(measured[0])}`;
    const takeBack = apply(plan, measured[0].trial);
    if (!takeBack) return `${best}; not written: its workflow is not open, or its Parallel Config is gone`;
    this.results.append(element("caption", "", "", this.backButton(takeBack)));
    const gpus = measured[0].trial.inputs.gpus || "empty";
    return `${best}; written into Parallel Config, whose method is manual now and gpus ${gpus}`;
  }

  // Puts Parallel Config back: with the degrees that are written, method auto alone would not be used.
  backButton(takeBack) {
    const button = element("button", "pdit-back", "Undo: Parallel Config as before");
    const act = () => {
      if (!takeBack()) throw new Error("its workflow is not open, or its Parallel Config is gone");
      button.parentNode?.remove();
      return "Parallel Config is as it was before the benchmark";
    };
    button.addEventListener("click", () => this.try(act));
    return button;
  }

  // The tab is opened: a benchmark may go on since it was closed.
  start(root) {
    this.end();
    root.replaceChildren(element("style", "", STYLE), this.body);
    this.timer = setInterval(() => this.poll(), POLL_MS);
    this.poll();
  }

  end() {
    clearInterval(this.timer);
  }

  async poll() {
    if (this.busy || document.hidden) return;
    this.busy = true;
    try {
      this.show(await ask("status"));
    } catch (error) {
      this.facts.replaceChildren(element("div", "error", error.message));
    } finally {
      this.busy = false;
    }
  }

  show({ backends, doing, graph_runs, last_run, last_error }) {
    this.isRunning = Boolean(doing) || graph_runs || backends.some(({ running }) => running);
    const views = backends.map(backendView);
    if (!backends.length) views.push(element("div", "muted", "No ranks run. Queue a graph with Load Parallel DiT."));
    if (doing) views.push(element("h3", "", "Now"), element("div", "", doing));
    if (last_run.seconds) {
      const text = `${last_run.what}: ${last_run.steps} steps in ${time(last_run.seconds)}`;
      views.push(element("h3", "", "Last run"), element("div", "", text));
    }
    this.facts.replaceChildren(...views);
    this.showError(last_error);
  }

  // Once: who reads the log does not lose the place.
  showError({ text, time: seconds, log, past }) {
    this.error.classList.toggle("past", Boolean(past));
    this.error.title = past ? "Runs after it have succeeded" : "";
    if (!text || seconds === this.shownError) return;
    this.shownError = seconds;
    const when = new Date(1000 * seconds).toLocaleTimeString();
    const views = [element("h3", "", `Last error, ${when}`), element("div", "error", text)];
    if (log) views.push(element("pre", "", log));
    this.error.replaceChildren(...views);
  }
}

const panel = new Panel();

app.registerExtension({
  name: "ParallelDiT.Panel",
  setup() {
    app.extensionManager?.registerSidebarTab?.({
      id: "parallel-dit",
      icon: "pi pi-microchip",
      title: "Parallel DiT",
      tooltip: "Parallel DiT: ranks, timeline, benchmark",
      type: "custom",
      render: (root) => panel.start(root),
      destroy: () => panel.end(),
    });
  },
});
