// TensorBoard in the page. Which way leads to it, only the page can tell: it asks the Jupyter server that it came from,
// and takes the other link that the kernel gave if that server has no extension of tfos_nb.

function baseUrl() {
  const config = document.getElementById("jupyter-config-data"); // holds the token too: read one key, keep nothing
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

async function way(model) {
  const base = baseUrl();
  if (base && (await answers(`${base}tfos-nb/api/version`))) {
    return `${base}tfos-nb/tb/${encodeURIComponent(model.get("cluster"))}/`;
  }
  return model.get("other") || null;
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
  const url = await way(model);
  if (!url) {
    box.append(element("p", model.get("advice"), { role: "alert" }));
    return;
  }
  line.append(element("a", "open in a tab ↗", { href: url, target: "_blank", rel: "noopener" }));
  if (model.get("height") > 0) {
    const frame = element("iframe", "", { title: `TensorBoard of ${name}`, height: String(model.get("height")) });
    frame.src = url;
    box.append(frame);
  }
}

export default { render };
