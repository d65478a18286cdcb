// Folds advanced inputs away on the classic canvas too, under a button. ComfyUI's canvas can, but its page only
// tells Nodes 2.0 which inputs are advanced. Both keep the state in the node's showAdvanced, which is saved.
import { app } from "../../scripts/app.js";

const CATEGORY = "Parallel DiT";
const BUTTON = "advanced inputs";
const ALWAYS = "Comfy.Node.AlwaysShowAdvancedWidgets";
// From here on a button takes less room than the inputs.
const LEAST = 2;
// Between widgets, pixels.
const GAP = 4;
// Where the slots of folded inputs are, pixels: nobody drops a link there.
const AWAY = -1e6;

const isAlwaysShown = () => Boolean(app.extensionManager?.setting?.get?.(ALWAYS));
const defaultOf = (node, { name }) => {
  const { required, optional } = node.constructor.nodeData.input ?? {};
  return (required?.[name] ?? optional?.[name])?.[1]?.default;
};
const isLinked = (node, { name }) => node.inputs?.some(({ widget, link }) => widget?.name === name && link != null);

// What has a value of its own stays in sight, as what a link gives does: it counts while it is folded, too.
const staysInSight = (node, widget) =>
  node.showAdvanced || isAlwaysShown() || isLinked(node, widget) || widget.value !== defaultOf(node, widget);

function fit(node) {
  if (!LiteGraph.vueNodesMode && !node.collapsed) node.setSize([node.size[0], node.computeSize()[1]]);
}

function fold(node, folded) {
  const { isWidgetVisible, getLayoutWidgets, toggleAdvanced } = node;
  for (const widget of folded) widget.advanced = true;
  const button = node.addWidget("button", BUTTON, null, () => node.toggleAdvanced(), { serialize: false, canvasOnly: true });
  button.serialize = false;

  node.isWidgetVisible = function (widget) {
    if (widget === button) return !this.collapsed && !isAlwaysShown();
    if (!folded.includes(widget)) return isWidgetVisible.call(this, widget);
    return !this.collapsed && !widget.hidden && staysInSight(this, widget);
  };
  node.getLayoutWidgets = function () {
    button.label = this.showAdvanced ? "hide advanced inputs" : "show advanced inputs";
    const isLaidOut = (widget) => (widget === button ? !isAlwaysShown() : !folded.includes(widget) || staysInSight(this, widget));
    const shown = getLayoutWidgets.call(this).filter(isLaidOut);
    for (const widget of folded) if (!shown.includes(widget)) widget.y = AWAY;
    return shown;
  };
  node.toggleAdvanced = function () {
    toggleAdvanced.call(this);
    fit(this);
  };
  fit(node);
}

app.registerExtension({
  name: "ParallelDiT.Advanced",

  nodeCreated(node) {
    if (node.constructor?.nodeData?.category !== CATEGORY) return;
    // older pages draw and lay out widgets by other means: they go on as they are
    if (!node.isWidgetVisible || !node.getLayoutWidgets || !node.toggleAdvanced) return;
    const folded = (node.widgets ?? []).filter(({ options }) => options?.advanced);
    if (folded.length >= LEAST) fold(node, folded);
  },

  // A page that had all inputs in sight has saved it; another height is somebody's wish.
  loadedGraphNode(node) {
    if (!node.widgets?.some(({ name, type }) => name === BUTTON && type === "button")) return;
    const hidden = node.widgets.filter((widget) => widget.advanced && !staysInSight(node, widget));
    const ofAll = node.computeSize()[1] + (hidden.length - 1) * (LiteGraph.NODE_WIDGET_HEIGHT + GAP); // without the button
    if (hidden.length && node.size[1] >= ofAll) fit(node);
  },
});
