async function show(given) {
  const box = document.currentScript?.previousElementSibling ?? document.body;
  const base = await google.colab.kernel.proxyPort(given.port, { cache: true });
  const [url, framed] = given.paths.map((path) => new URL(path, base).toString()); // each opens once
  const link = Object.assign(document.createElement("a"), { href: url, target: "_blank", rel: "noopener" });
  link.textContent = `TensorBoard of ${given.name} ↗`;
  box.append(link);
  if (given.height > 0) {
    const frame = Object.assign(document.createElement("iframe"), { src: framed, title: link.textContent, width: "100%" });
    frame.height = given.height;
    frame.style.border = "0";
    box.append(frame);
  }
}
