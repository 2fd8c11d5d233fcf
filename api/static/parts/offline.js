// A trajectory as one file: the page's own modules, sheet and the data in it. It opens from a disk, without a network.

const ENTRY = "../views/sheet.js";
const IMPORT = /(from\s+)"(\.[^"]+)"/g;

/** The file's text. Modules name one another by file, which are made names of an import map. */
export async function offlinePage(view) {
  const modules = new Map();
  await collect(new URL(ENTRY, import.meta.url), modules);
  const dom = new URL("dom.js", import.meta.url);
  const imports = Object.fromEntries(
    [...modules].map(([url, text]) => [nameOf(url), `data:text/javascript;charset=utf-8,${encodeURIComponent(text)}`]),
  );
  const sheet = await textOf(new URL("../style.css", import.meta.url));
  const policy = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'";
  return `<!doctype html>
<html lang="en" data-theme="auto">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="content-security-policy" content="${policy}">
<title>rollfab</title>
<style>${sheet}</style>
<script type="importmap">${inScript({ imports })}</script>
</head>
<body>
<main><div class="head"><h1 id="name"></h1><span class="faint" id="kept"></span></div><div id="view"></div></main>
<script type="application/json" id="data">${inScript(view)}</script>
<script type="module">
import { patch } from "${nameOf(dom.href)}";
import { Sheet } from "${nameOf(new URL(ENTRY, import.meta.url).href)}";
const view = JSON.parse(document.getElementById("data").textContent);
const wishes = new URLSearchParams();
const draw = () => patch(document.getElementById("view"), sheet.draw(view));
const sheet = new Sheet(draw, wishes, (name, value) => { wishes.set(name, value); draw(); });
document.title = document.getElementById("name").textContent = view.trajectory_id;
document.getElementById("kept").textContent = ${JSON.stringify(`as it was on ${new Date().toISOString()}`)};
draw();
</script>
</body>
</html>
`;
}

async function collect(url, modules) {
  if (modules.has(url.href)) return;
  modules.set(url.href, "");
  const text = await textOf(url);
  const found = [...text.matchAll(IMPORT)].map((match) => new URL(match[2], url));
  modules.set(
    url.href,
    text.replace(IMPORT, (_, from, path) => `${from}"${nameOf(new URL(path, url).href)}"`),
  );
  await Promise.all(found.map((each) => collect(each, modules)));
}

const nameOf = (href) => `rollfab/${href.split("/static/").at(-1)}`;

async function textOf(url) {
  const answer = await fetch(url);
  if (!answer.ok) throw new Error(`${url} answered ${answer.status}`);
  return answer.text();
}

/** JSON that no text in it can end: "<" is written as its number. */
const inScript = (value) => JSON.stringify(value).replaceAll("<", "\\u003c");

export function save(name, type, text) {
  const link = document.createElement("a");
  link.download = name;
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
