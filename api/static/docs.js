// The api's documentation, drawn from its own openapi.json: what there is, what it takes, what it answers.

const make = (name, words = "", kind = "") => {
  const element = document.createElement(name);
  element.textContent = words;
  element.className = kind;
  return element;
};

const document_ = await (await fetch("openapi.json")).json();
const schemas = document_.components?.schemas ?? {};
document.getElementById("about").textContent = `${document_.info.description} Version ${document_.info.version}.`;

function typeName(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.map(typeName).join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.type === "array") return `${typeName(schema.items)}[]`;
  if (schema.type === "object" && typeof schema.additionalProperties === "object") return `{name: ${typeName(schema.additionalProperties)}}`;
  return schema.type ?? "any";
}

function table(rows) {
  const table = make("table");
  for (const cells of rows) {
    const row = make("tr");
    const name = make("td");
    name.append(make("code", cells[0]));
    row.append(name, ...cells.slice(1).map((cell) => make("td", cell)));
    table.append(row);
  }
  return table;
}

function fold(title, content) {
  const details = make("details");
  details.append(make("summary", title), content);
  return details;
}

function model(title, schema) {
  const name = typeName(schema);
  const found = schemas[name];
  if (!found?.properties) return make("p", `${title}: ${name}`);
  const rows = Object.entries(found.properties).map(([field, each]) => [field, typeName(each), each.description ?? ""]);
  return fold(`${title}: ${name}`, table(rows));
}

function operation(path, method, spec) {
  const article = make("article", "", "panel");
  const head = make("h3");
  head.append(make("b", method.toUpperCase(), method), path);
  article.append(head, make("p", spec.description ?? spec.summary ?? ""));
  if (spec.parameters) {
    article.append(table(spec.parameters.map((each) => [each.name, typeName(each.schema), each.description ?? `in ${each.in}`])));
  }
  const body = spec.requestBody?.content["application/json"]?.schema;
  if (body) article.append(model("takes", body));
  const answer = spec.responses["200"]?.content?.["application/json"]?.schema;
  if (answer) article.append(model("answers", answer));
  return article;
}

const list = document.getElementById("operations");
for (const [path, methods] of Object.entries(document_.paths)) {
  for (const [method, spec] of Object.entries(methods)) list.append(operation(path, method, spec));
}
const models = make("article", "", "panel");
models.append(make("h3", "Models"));
for (const [name, schema] of Object.entries(schemas)) {
  if (!name.includes("Validation") && schema.properties) models.append(model("model", { $ref: `/${name}` }));
}
list.append(models);
