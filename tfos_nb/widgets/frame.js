// TensorBoard in the page. Only the page can find out which URL works: it asks the Jupyter server that it came from,
// and uses the kernel's other link if that server does not have tfos_nb's extension.

function baseUrl() {
  const config = document.getElementById("jupyter-config-data"); // it also holds the token: read only one key
  if (config) {
    try {
      return JSON.parse(config.textContent).baseUrl || "/";
    } catch {
      return null;
    }
  }
  return document.body.dataset.baseUrl || null;
}

async function answers(url) {
  try {
    return (await fetch(url, { credentials: "same-origin" })).ok;
  } catch {
    return false;
  }
}

/** Find the addresses for the frame and the link, and whether they work only on the kernel's own machine. */
async function way(model) {
  const base = baseUrl();
  const ours = base && `${base}tfos-nb/tb/${encodeURIComponent(model.get("cluster"))}/`;
  if (base && (await answers(`${base}tfos-nb/api/version`))) return { urls: [ours, ours], near: false };
  const [framed, linked] = model.get("access_links");
  const proxied = model.get("proxied");
  const leads = !proxied.startsWith("/") || (await answers(proxied)); // a server without a proxy answers with 404
  const root = leads ? proxied : model.get("local");
  return { urls: [root + framed, root + linked], near: root === model.get("local") };
}

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

async function render({ model, el }) {
  const name = model.get("name");
  const box = element("section", "", { class: "tfos-frame", "aria-label": `TensorBoard of ${name}` });
  const line = element("div", "", { class: "tfos-frame-line" });
  line.append(element("b", name), element("span", model.get("log_dir"), { class: "tfos-frame-dir" }));
  box.append(line);
  el.append(box);
  const { urls, near } = await way(model);
  line.append(element("a", "open in a tab ↗", { href: urls[1], target: "_blank", rel: "noopener" }));
  if (near) box.append(element("p", `${model.get("advice")} Until then, on the kernel's own machine: ${model.get("local")}`));
  if (model.get("height") > 0) {
    const frame = element("iframe", "", { title: `TensorBoard of ${name}`, height: String(model.get("height")) });
    frame.src = urls[0];
    box.append(frame);
  }
}

// --- the notebook's file: what it shows to a reader without this kernel, as in panel.js ---

const STATE = "application/vnd.jupyter.widget-state+json";
const AFTERWARDS = "export default { render({ model, el }) { el.textContent = model.get('said'); } };";
const OF_A_WIDGET = [
  "_model_module", "_model_module_version", "_model_name", "_view_module", "_view_module_version", "_view_name",
  "_anywidget_id",
];

/** The widget's state in the file: a line, without the addresses. */
function kept(model) {
  const state = Object.fromEntries(OF_A_WIDGET.map((name) => [name, model.get(name)]));
  const said = `TensorBoard of ${model.get("name")}: ${model.get("log_dir")} (%tfos_tensorboard shows it)`;
  return {
    model_name: state._model_name,
    model_module: state._model_module,
    model_module_version: state._model_module_version,
    state: { ...state, _esm: AFTERWARDS, _css: "", said },
  };
}

function initialize({ model }) {
  const context = (model.widget_manager || {}).context;
  const notebook = context && context.saveState && context.model;
  if (!notebook || !notebook.setMetadata) return undefined;
  const saving = (_, event) => {
    if (event !== "started") return;
    const before = notebook.getMetadata("widgets") || {};
    const states = { ...(before[STATE] || {}).state, [model.get("widget")]: kept(model) };
    notebook.setMetadata("widgets", { ...before, [STATE]: { version_major: 2, version_minor: 0, ...before[STATE], state: states } });
  };
  context.saveState.connect(saving);
  return () => context.saveState.disconnect(saving);
}

export default { initialize, render };
