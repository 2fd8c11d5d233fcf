// Elements as trees: `h` says what shall be there, `patch` changes only what differs, so that selections, focus and
// what somebody unfolded stay. Texts are other people's: they become text nodes and attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

/**
 * An element to be. tag: "td.r.num". props: attributes, on… handlers, and
 * key (which row it is, when rows move), f (data-f: its name for those who look for it), style (an object).
 * children: trees, texts, numbers, elements (left alone), lists of them; null and false are nothing.
 */
export function h(tag, props, ...children) {
  const [name, ...classes] = tag.split(".");
  return { name, classes: classes.join(" "), props: props ?? {}, children };
}

/** Make the children of an element what `children` say. */
export function patch(parent, ...children) {
  const wanted = children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false);
  const keys = new Set(wanted.map((each) => each.props?.key));
  const keyed = new Map();
  for (const node of [...parent.childNodes]) {
    if (node.treeKey === undefined) continue;
    if (keys.has(node.treeKey)) keyed.set(node.treeKey, node);
    else node.remove();
  }
  let place = parent.firstChild;
  for (const want of wanted) {
    const node = find(want, place, keyed) ?? create(want, parent);
    if (node === place) place = place.nextSibling;
    else parent.insertBefore(node, place);
    fill(node, want);
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

function find(want, place, keyed) {
  if (want instanceof Node) return want;
  if (want.props === undefined) return place?.nodeType === Node.TEXT_NODE ? place : null;
  const node = want.props.key === undefined ? place : keyed.get(want.props.key);
  const fits = node && node.treeName === want.name && node.treeKey === want.props.key;
  return fits ? node : null;
}

function create(want, parent) {
  if (want.props === undefined) return document.createTextNode("");
  const isDrawn = want.name === "svg" || parent.namespaceURI === SVG;
  const node = isDrawn ? document.createElementNS(SVG, want.name) : document.createElement(want.name);
  node.treeName = want.name;
  node.treeKey = want.props.key;
  return node;
}

function fill(node, want) {
  if (want instanceof Node) return;
  if (want.props === undefined) {
    const words = String(want);
    if (node.data !== words) node.data = words;
    return;
  }
  const { props } = want;
  const before = node.treeProps ?? {};
  if (props.same !== undefined && props.same === before.same) return; // whoever drew it says that nothing changed
  const names = [props.class, want.classes].filter(Boolean).join(" ");
  if ((node.getAttribute("class") ?? "") !== names) node.setAttribute("class", names);
  for (const name of Object.keys(before)) if (!(name in props)) set(node, name, null);
  for (const [name, value] of Object.entries(props)) if (before[name] !== value) set(node, name, value);
  patch(node, ...want.children);
  if (props.value !== undefined && node.value !== props.value) node.value = props.value; // a select's, once it has options
  node.treeProps = props;
}

const PROPERTIES = ["disabled", "hidden", "checked", "open"];

function set(node, name, value) {
  if (["key", "same", "class", "value"].includes(name)) return;
  if (name.startsWith("on") || PROPERTIES.includes(name)) node[name] = value ?? (name.startsWith("on") ? null : false);
  else if (name === "style")
    for (const [each, words] of Object.entries(value ?? {})) node.style.setProperty(each, words);
  else if (value === null || value === undefined || value === false) node.removeAttribute(attribute(name));
  else node.setAttribute(attribute(name), value === true ? "" : value);
}

const attribute = (name) => (name === "f" ? "data-f" : name);
