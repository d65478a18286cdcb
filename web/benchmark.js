// Runs the graph up to its sampler once for each way to share the work, through ComfyUI's own queue, and
// writes the fastest into the Parallel Config.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

// How a prompt ends, as ComfyUI says it to the page, and in its history.
const ENDS = ["execution_success", "execution_error", "execution_interrupted"];
// How often ComfyUI is asked for it: an event may be missed, as while the page reconnects.
const LOOK_MS = 5000;

export async function ask(name, body) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const response = await api.fetchApi(`/parallel_dit/${name}`, {
    headers: { "Content-Type": "application/json" },
    ...options,
  });
  const found = await response.json().catch(() => null); // a proxy's page, or a pack that was not started
  if (!response.ok || !found) throw new Error(found?.error ?? refusal(response.status));
  return found;
}

export function refusal(status) {
  return `ComfyUI answered ${status}: restart it, and look for parallel-dit in its console`;
}

async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  return api.fetchApi(path, { method: "POST", headers, body: JSON.stringify(body) });
}

// Takes a prompt out of the queue, or interrupts it where it runs: never another one.
async function cancel(id) {
  await post("/queue", { delete: [id] });
  await post("/interrupt", { prompt_id: id });
}

// ComfyUI's answer to a question; null where it gives none, as while it starts again.
async function answer(path) {
  try {
    const response = await api.fetchApi(path);
    return response.ok ? await response.json() : null;
  } catch {
    return null;
  }
}

// The end of a prompt, as [event, detail]; null where it was deleted, undefined where it waits or runs, or
// where nobody knows. ComfyUI moves it from its queue to its history at once, so it is looked for there last.
async function endOf(id) {
  const queue = await answer("/queue");
  if (!queue || [...queue.queue_running, ...queue.queue_pending].some((each) => each[1] === id)) return undefined;
  const history = await answer(`/history/${id}`);
  if (!history) return undefined;
  const status = history[id]?.status;
  const said = status?.messages?.find(([type]) => ENDS.includes(type));
  return said ?? (status?.completed ? ["execution_success", {}] : null);
}

// Ends a benchmark and its trial, which may wait behind other prompts, or be gone from the queue; before the
// first trial its question.
export class Stop {
  constructor() {
    this.isStopped = false;
    this.prompt = null;
    this.benchmark = String(Math.random());
    this.stopped = new Promise((resolve) => (this.resolve = resolve));
  }

  async now() {
    this.isStopped = true;
    try {
      await (this.prompt ? cancel(this.prompt) : ask("stop_trials", { benchmark: this.benchmark }));
    } finally {
      this.resolve(null);
    }
  }
}

// Queues a prompt of API form and waits for its end, or for `stop`: null where it did not succeed.
async function run(prompt, workflow, stop) {
  let listener;
  let look;
  const seen = new Map();
  let wanted;
  const ended = new Promise((resolve) => {
    listener = ({ type, detail }) => {
      seen.set(detail?.prompt_id, [type, detail]);
      if (seen.has(wanted)) resolve(seen.get(wanted));
    };
    look = async () => {
      const end = wanted && (await endOf(wanted));
      if (end !== undefined) resolve(end);
    };
  });
  ENDS.forEach((name) => api.addEventListener(name, listener));
  api.addEventListener("reconnected", look);
  const timer = setInterval(look, LOOK_MS);
  try {
    const extra_data = { extra_pnginfo: { workflow } }; // whose nodes its reports are of
    const response = await post("/prompt", { client_id: api.clientId, prompt, extra_data });
    const reply = await response.json();
    const errors = Object.values(reply.node_errors ?? {}).flatMap((node) => node.errors);
    if (!response.ok) throw new Error(errors[0]?.details ?? reply.error?.message ?? "ComfyUI refused the graph");
    wanted = stop.prompt = reply.prompt_id;
    if (stop.isStopped) await cancel(wanted); // while it was queued
    const end = seen.get(wanted) ?? (await Promise.race([ended, stop.stopped]));
    if (!end) return null;
    const [type, detail] = end;
    if (type === "execution_error") throw new Error(detail.exception_message);
    return type === "execution_success" ? wanted : null;
  } finally {
    stop.prompt = null;
    clearInterval(timer);
    ENDS.forEach((name) => api.removeEventListener(name, listener));
    api.removeEventListener("reconnected", look);
  }
}

async function seconds(trial, workflow, stop) {
  let least = Infinity;
  for (const prompt of trial.prompts) {
    const id = stop.isStopped ? null : await run(prompt, workflow, stop);
    if (id === null) return null;
    const { last_run } = await ask("status");
    if (last_run.prompt === id) least = Math.min(least, last_run.seconds);
  }
  if (least === Infinity) throw new Error("ComfyUI remembered this run; change the seed and try again");
  return least;
}

// What tells the open workflow from others, whose nodes may have the same ids.
function openWorkflow() {
  return `${app.graph.id}:${app.extensionManager?.workflow?.activeWorkflow?.path ?? ""}`;
}

// Yields {plan}, then {trial, seconds | error, of, index} of each; ends early at `stop` or Cancel.
export async function* benchmark(stop) {
  const opened = openWorkflow();
  const { output, workflow } = await app.graphToPrompt();
  const selected = idOf(Object.values(app.canvas?.selected_nodes ?? {})[0]);
  let plan;
  if (stop.isStopped) return; // before the question there is nothing that a stop would find
  try {
    plan = await ask("trials", { prompt: output, sampler: selected, benchmark: stop.benchmark });
  } catch (error) {
    if (stop.isStopped) return; // by which it has failed
    throw error;
  }
  plan.workflow = opened;
  yield { plan };
  for (const [index, trial] of plan.trials.entries()) {
    const result = { trial, index, of: plan.trials.length };
    yield result;
    try {
      result.seconds = await seconds(trial, workflow, stop);
    } catch (error) {
      result.error = error.message;
    }
    if (result.seconds === null) {
      stop.isStopped = true; // by Cancel, or another queue
      return;
    }
    yield result;
  }
}

// A node of the page by its id in the API form, where "7:3" is node 3 of the subgraph 7.
export function nodeOf(id) {
  return String(id)
    .split(":")
    .reduce((found, part) => (found?.subgraph ?? found)?.getNodeById?.(Number(part)), app.graph);
}

// The id of a node of the page in the API form; empty for none.
function idOf(node, graph = app.graph) {
  if (!node || node.graph === graph) return node ? String(node.id) : "";
  for (const each of graph?.nodes ?? []) {
    const inner = each.subgraph ? idOf(node, each.subgraph) : "";
    if (inner) return `${each.id}:${inner}`;
  }
  return "";
}

// Writes inputs into the widgets of a node; returns the values before.
function write(node, inputs) {
  const before = {};
  for (const widget of node.widgets) {
    if (!(widget.name in inputs)) continue;
    before[widget.name] = widget.value;
    widget.value = inputs[widget.name];
    widget.callback?.(widget.value, app.canvas, node);
  }
  node.setDirtyCanvas?.(true, true);
  app.extensionManager?.workflow?.activeWorkflow?.changeTracker?.checkState?.();
  return before;
}

// Writes a trial's inputs into the Parallel Config of the plan, which is made where there was none. Returns
// what takes them back, and says whether it did; null where nothing was written: not into another workflow,
// which may be open by now, nor into another node.
export function apply(plan, trial) {
  if (openWorkflow() !== plan.workflow) return null;
  let node = plan.config ? nodeOf(plan.config) : null;
  if (plan.config && node?.type !== "ParallelConfig") return null;
  if (!node) {
    const loader = nodeOf(plan.loader);
    if (loader?.type !== "LoadParallelDiT") return null;
    node = LiteGraph.createNode("ParallelConfig");
    loader.graph.add(node);
    node.pos = [loader.pos[0] - node.size[0] - 60, loader.pos[1]];
    node.connect(0, loader, loader.findInputSlot("config"));
  }
  const before = write(node, trial.inputs);
  return () => {
    const isThere = openWorkflow() === plan.workflow && node.graph?.getNodeById(node.id) === node;
    if (isThere) write(node, before);
    return isThere;
  };
}
