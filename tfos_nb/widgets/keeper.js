// The notebook's file: it shows a widget after the kernel has ended, if the page gives access to its notebook.
// JupyterLab and Notebook do.

const VIEW = "application/vnd.jupyter.widget-view+json";
const STATE = "application/vnd.jupyter.widget-state+json";
const OF_A_WIDGET = [
  "_model_module", "_model_module_version", "_model_name", "_view_module", "_view_module_version", "_view_name",
  "_anywidget_id", "_esm", "_css",
];
const OUTCOME_AFTER = 2000; // milliseconds in which the kernel can put the outcome into the output itself

/**
 * Keeps a widget's state in the saved file, and replaces the widget by its outcome, which the kernel cannot do in a
 * reloaded page. `trait` is the widget's dictionary, which has the widget's id as `widget`. `still` turns it into the
 * dictionary for the file, with `saved: true`.
 */
class Keeper {
  constructor(model, context, trait, still) {
    this.model = model;
    this.context = context;
    this.trait = trait;
    this.still = still;
    this.saving = (_, event) => event === "started" && this.keep();
    this.later = () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.settle(), OUTCOME_AFTER);
    };
    context.saveState.connect(this.saving);
    model.on("change:outcome", this.later);
    if (this.ended()) this.later();
  }

  ended() {
    return Object.keys(this.model.get("outcome") || {}).length > 0;
  }

  /** All outputs of the notebook that are widgets: their places and ids. */
  widgets() {
    const { cells } = this.context.model;
    const found = [];
    for (let i = 0; i < cells.length; i += 1) {
      const { outputs } = cells.get(i);
      for (let place = 0; outputs && place < outputs.length; place += 1) {
        const view = (outputs.get(place).data || {})[VIEW];
        if (view) found.push({ outputs, place, id: view.model_id });
      }
    }
    return found;
  }

  /** Replace the widget by its outcome. */
  settle() {
    if (!this.ended() || this.context.isDisposed) return;
    const { widget } = this.model.get(this.trait);
    for (const { outputs, place, id } of this.widgets()) {
      if (id !== widget) continue;
      outputs.set(place, { output_type: "display_data", data: this.model.get("outcome"), metadata: {} });
    }
  }

  /** Before the file is written, add this widget's state if it is shown, and remove the states of those not shown. */
  keep() {
    this.settle();
    const notebook = this.context.model;
    const before = notebook.getMetadata("widgets") || {};
    const state = { ...(before[STATE] || {}).state };
    const shown = new Set(this.widgets().map(({ id }) => id));
    const others = Object.keys(state).filter((id) => ((state[id].state || {})[this.trait] || {}).saved && !shown.has(id));
    for (const id of others) delete state[id];
    const data = this.model.get(this.trait);
    const ours = shown.has(data.widget) && !data.saved;
    if (ours) state[data.widget] = this.saved(data);
    if (!ours && !others.length) return;
    const kept = { ...before, [STATE]: { version_major: 2, version_minor: 0, ...before[STATE], state } };
    if (!Object.keys(state).length) delete kept[STATE];
    if (Object.keys(kept).length) notebook.setMetadata("widgets", kept);
    else notebook.deleteMetadata("widgets");
  }

  /** This widget's state for the file. */
  saved(data) {
    const state = Object.fromEntries(OF_A_WIDGET.map((name) => [name, this.model.get(name)]));
    return {
      model_name: state._model_name,
      model_module: state._model_module,
      model_module_version: state._model_module_version,
      state: { ...state, [this.trait]: this.still(data) },
    };
  }

  close() {
    clearTimeout(this.timer);
    this.context.saveState.disconnect(this.saving);
    this.model.off("change:outcome", this.later);
  }
}

/** Keep a widget in its notebook's file, if the page gives access to it; return a function that ends this. */
export function keepIn(model, trait, still) {
  const context = (model.widget_manager || {}).context;
  const notebook = context && context.saveState && context.model;
  if (!notebook || !notebook.cells || !notebook.setMetadata) return undefined;
  const keeper = new Keeper(model, context, trait, still);
  return () => keeper.close();
}
