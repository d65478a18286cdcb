// Keeps the report under a node of this pack when tabs are switched and when the page is loaded again.
import { app } from "../../scripts/app.js";

const CATEGORY = "Parallel DiT";
// ComfyUI's own name of the widget for progress texts: one widget shows both.
const WIDGET = "$$node-text-preview";

const storageKey = (node) => `parallel-dit:${node.graph?.id ?? app.graph?.id}:${node.id}`;

function addWidget(node) {
  const element = document.createElement("div");
  element.style.cssText =
    "white-space: pre-wrap; overflow: auto; font-size: 11px; line-height: 1.35; padding: 2px 6px; user-select: text;";
  return node.addDOMWidget(WIDGET, "report", element, {
    getValue: () => element.textContent,
    setValue: (value) => {
      element.textContent = value;
    },
    getMinHeight: () => 58,
    serialize: false,
  });
}

function show(node, text) {
  let widget = node.widgets?.find(({ name }) => name === WIDGET);
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
  node.setDirtyCanvas?.(true, true);
}

app.registerExtension({
  name: "ParallelDiT.Report",

  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.category !== CATEGORY) return;
    const executed = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (output) {
      executed?.apply(this, arguments);
      const text = output?.parallel_dit?.join("\n");
      if (!text) return;
      sessionStorage.setItem(storageKey(this), text);
      show(this, text);
    };
  },

  loadedGraphNode(node) {
    const text = sessionStorage.getItem(storageKey(node));
    if (text && node.constructor?.nodeData?.category === CATEGORY) show(node, text);
  },
});
