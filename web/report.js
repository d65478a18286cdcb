// Keeps the report under a node of this pack: when tabs are switched, also during a run, when the page is
// loaded again, and when a run is cancelled or fails.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { nodeOf } from "./benchmark.js";

const CATEGORY = "Parallel DiT";
// ComfyUI's own name of the widget for progress texts: one widget shows both.
const WIDGET = "$$node-text-preview";
const LINE = 15; // pixels
const LETTER = 5.6; // mean width in pixels
const MARGIN = 30; // of a line in its node, pixels
const MIN_HEIGHT = 58; // ComfyUI's own height, pixels
const MAX_HEIGHT = 240; // pixels; longer reports scroll

const isOurs = (node) => node?.constructor?.nodeData?.category === CATEGORY;
const isOurType = (type) => globalThis.LiteGraph?.registered_node_types[type]?.nodeData?.category === CATEGORY;
const holdsOurs = (graph) => (graph?.nodes ?? []).some((node) => isOurs(node) || holdsOurs(node.subgraph));
const keyOf = (graph, id) => `parallel-dit:${graph}:${id}`;
const storageKey = (node) => keyOf(node.graph?.id ?? app.graph?.id, node.id);
const widgetOf = (node) => node.widgets?.find(({ name }) => name === WIDGET);

// Room for all lines, wrapped: the element cannot be measured while its node is out of sight.
function heightOf(text, width) {
  const letters = Math.max(20, (width - MARGIN) / LETTER);
  const rows = text.split("\n").reduce((sum, line) => sum + Math.max(1, Math.ceil(line.length / letters)), 0);
  return Math.min(MAX_HEIGHT, Math.max(MIN_HEIGHT, rows * LINE + 10));
}

function addWidget(node) {
  const element = document.createElement("div");
  element.className = "pdit-report";
  element.style.cssText = `white-space: pre-wrap; overflow: auto; font-size: 11px; line-height: ${LINE}px; padding: 2px 6px; user-select: text; box-sizing: border-box;`;
  const height = () => heightOf(element.textContent, node.size[0]);
  return node.addDOMWidget(WIDGET, "report", element, {
    getValue: () => element.textContent,
    setValue: (value) => {
      element.textContent = value;
      element.style.minHeight = `${height()}px`; // Nodes 2.0 asks the element
    },
    getMinHeight: height,
    serialize: false,
  });
}

function show(node, text) {
  let widget = widgetOf(node);
  if (widget && !widget.isReport) {
    // ComfyUI's own, which puts all lines into one
    widget.onRemove?.();
    node.widgets.splice(node.widgets.indexOf(widget), 1);
    widget = undefined;
  }
  if (!widget) {
    widget = addWidget(node);
    widget.serialize = false;
    widget.isReport = true;
  }
  widget.value = text;
  const needed = node.computeSize?.()[1] ?? 0;
  if (node.size[1] < needed) node.setSize([node.size[0], needed]);
  node.setDirtyCanvas?.(true, true);
}

// Queued prompt -> promise of the id of its graph: another one may be open when it ends.
const graphs = new Map();

async function graphOf(prompt) {
  if (!graphs.has(prompt)) graphs.set(prompt, findGraph(prompt).catch(() => undefined));
  return (await graphs.get(prompt)) ?? app.graph.id;
}

async function findGraph(prompt) {
  const get = async (path) => (await api.fetchApi(path)).json();
  const { queue_running, queue_pending } = await get("/queue");
  const item = [...queue_running, ...queue_pending].find((each) => each[1] === prompt);
  const extra = item?.[3] ?? (await get(`/history/${prompt}`))[prompt]?.prompt[3];
  return extra?.extra_pnginfo?.workflow?.id;
}

// Keeps `text(node)` for the node `id` of a prompt, and shows it if its graph is open; else what the node in
// its place in the open graph had: ComfyUI has put the prompt's progress there.
async function keep(prompt, id, text) {
  const graph = await graphOf(prompt);
  const node = nodeOf(id);
  if (graph !== app.graph.id) {
    store(keyOf(graph, id), text(null));
    if (isOurs(node) && widgetOf(node)) show(node, sessionStorage.getItem(storageKey(node)) ?? "");
  } else if (isOurs(node)) {
    const report = text(node);
    show(node, report);
    store(storageKey(node), report);
  }
}

function store(key, text) {
  try {
    sessionStorage.setItem(key, text);
  } catch (error) {
    console.warn("parallel-dit: a report is not stored for the next time that the page is loaded:", error);
  }
}

// Shows reports again: newer pages remove widgets of this name when a run ends.
// Not of the node that has failed, which gets its own.
function restore(but, graph = app.graph) {
  for (const node of graph?.nodes ?? []) {
    restore(but, node.subgraph ?? null);
    const text = isOurs(node) && !widgetOf(node) && sessionStorage.getItem(storageKey(node));
    if (text && node !== but) show(node, text);
  }
}

app.registerExtension({
  name: "ParallelDiT.Report",

  setup() {
    // while it surely is in the queue, which is large: not for graphs without nodes of this pack
    api.addEventListener("execution_start", ({ detail }) => holdsOurs(app.graph) && graphOf(detail.prompt_id));
    api.addEventListener("execution_success", ({ detail }) => graphs.delete(detail.prompt_id));
    ["execution_success", "execution_error", "execution_interrupted"].forEach((end) =>
      api.addEventListener(end, ({ detail }) => setTimeout(() => restore(detail.node_id && nodeOf(detail.node_id)), 0)),
    );
    api.addEventListener("executed", ({ detail }) => {
      const text = detail.output?.parallel_dit?.join("\n");
      if (text) keep(detail.prompt_id, detail.display_node ?? detail.node, () => text);
    });
    const ended = (sentence) => ({ detail }) => {
      const shown = (node) => (node && widgetOf(node)?.value?.trim()) || sentence(detail);
      if (isOurType(detail.node_type)) keep(detail.prompt_id, detail.node_id, shown);
      graphs.delete(detail.prompt_id); // what keeps waits for has begun
    };
    api.addEventListener("execution_interrupted", ended(() => "cancelled"));
    api.addEventListener("execution_error", ended((detail) => detail.exception_message));
  },

  loadedGraphNode(node) {
    const text = sessionStorage.getItem(storageKey(node));
    if (text && isOurs(node)) show(node, text);
  },
});
