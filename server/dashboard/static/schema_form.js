// SPDX-License-Identifier: Apache-2.0
// Fields of a form, made of an operation's JSON schema. Only what was filled in is sent.

import { attribute, h, text } from "./dom.js";

/** The schema of a field without its "or null", which an empty field stands for. */
function plainSchema(schema) {
  const options = schema.anyOf?.filter((each) => each.type !== "null");
  return options?.length === 1 ? { ...schema, ...options[0], nullable: true } : schema;
}

const choicesOf = (schema) => schema.enum ?? schema.pattern?.match(/^\^\(([a-z|-]+)\)\$$/)?.[1].split("|");

function select(choices) {
  return h("select", {}, choices.map(([value, title]) => h("option", { value }, title)));
}

// How a kind of field is shown, and read; undefined: nothing was said.

function booleanControl(schema) {
  if (schema.nullable) {
    const control = select([["", "by default"], ["true", "yes"], ["false", "no"]]);
    return { control, read: () => (control.value ? control.value === "true" : undefined) };
  }
  const control = h("input", { type: "checkbox", checked: schema.default === true });
  return { control, read: () => (control.checked === (schema.default === true) ? undefined : control.checked) };
}

function numberControl(schema) {
  const control = h("input", {
    type: "number", step: schema.type === "integer" ? "1" : "any", placeholder: schema.default ?? "",
    min: schema.minimum ?? schema.exclusiveMinimum, max: schema.maximum,
  });
  const read = () => {
    if (control.validity.badInput) return control.value || "not a number";
    return control.value === "" ? undefined : Number(control.value);
  };
  return { control, read };
}

/** A size in MB, also as the command line reads it: 512M, 2G. */
function sizeControl() {
  const control = h("input", { type: "text", placeholder: "512M, 2G", spellcheck: "false", autocomplete: "off" });
  const read = () => {
    const typed = control.value.trim();
    const [, count, unit] = typed.match(/^(\d+(?:\.\d+)?) ?([MGT]?)B?$/i) ?? [];
    return count ? Math.round(count * 1024 ** "MGT".indexOf((unit || "M").toUpperCase())) : typed || undefined;
  };
  return { control, read };
}

function textControl(schema) {
  const choices = choicesOf(schema);
  if (choices) {
    const control = select([["", schema.default ?? "by default"], ...choices.map((each) => [each, each])]);
    return { control, read: () => control.value || undefined };
  }
  const control = h("input", { type: "text", placeholder: schema.default ?? "", spellcheck: "false", autocomplete: "off" });
  return { control, read: () => control.value.trim() || undefined };
}

const linesOf = (control) => control.value.split("\n").map((line) => line.trim()).filter(Boolean);

function listControl() {
  const control = h("textarea", { rows: "2", placeholder: "one a line", spellcheck: "false" });
  return { control, read: () => (linesOf(control).length ? linesOf(control) : undefined) };
}

function mappingControl() {
  const control = h("textarea", { rows: "2", placeholder: "NAME=VALUE, one a line", spellcheck: "false" });
  const pair = (line) => [line.split("=", 1)[0].trim(), line.slice(line.indexOf("=") + 1)];
  const read = () => {
    const lines = linesOf(control);
    return lines.length ? Object.fromEntries(lines.map((line) => (line.includes("=") ? pair(line) : ["", line]))) : undefined;
  };
  return { control, read };
}

/** A field of an action, whose value may be any JSON; `write(value)` sets it. */
export function actionControl(schema, isRequired) {
  const choices = "const" in schema ? [schema.const] : schema.enum ?? (schema.type === "boolean" ? [true, false] : null);
  const isJson = !choices && schema.type !== "string";
  const control = choices
    ? select([...(isRequired ? [] : [["", "left out"]]), ...choices.map((each) => [JSON.stringify(each), String(each)])])
    : h("textarea", { rows: "2", spellcheck: "false", placeholder: isJson ? "JSON" : null });
  const read = () => {
    if (control.value.trim() === "") return isRequired && !isJson ? control.value : undefined;
    if (!choices && !isJson) return control.value;
    try { return JSON.parse(control.value); } catch (error) {
      if (schema.type === "array" || schema.type === "object") throw new Error(`No JSON: ${error.message}`);
      return control.value; // of a field without one type
    }
  };
  const write = (value) => { control.value = value === undefined ? "" : choices || isJson ? JSON.stringify(value) : value; };
  if (schema.type !== "integer" && schema.type !== "number" || choices) return { control, read, write };
  const found = numberControl(schema);
  return { ...found, write: (value) => { found.control.value = value ?? ""; } };
}

const CONTROLS = { boolean: booleanControl, integer: numberControl, number: numberControl, string: textControl, array: listControl, object: mappingControl };

const optionControl = (schema, _isRequired, name) => (name.endsWith("_mb") ? sizeControl : CONTROLS[schema.type] ?? textControl)(schema);

/** `memory_mb` → Memory; `step_timeout_seconds` → Step timeout (seconds). */
function titleOf(name) {
  const [, stem, unit] = name.match(/^(.*?)(?:_(mb|seconds))?$/);
  const words = stem === "cwd" ? "folder" : stem.replaceAll("_", " ");
  const shown = unit === "seconds" ? " (seconds)" : "";
  return words[0].toUpperCase() + words.slice(1) + shown;
}

/** An option's description, without what is said for the command line alone. */
const noteOf = (description = "") => description.replace(/: (\d+M, )?\d+G\./, ".").replace(/( Without a value, the one it has here\.)? Repeatable\.$/, "");

/** One field: its element, `read()`, `fail(message)`. */
function makeField(id, name, schema, isRequired, controlOf) {
  const { control, read, write } = controlOf(plainSchema(schema), isRequired, name);
  const [note, problem] = [`${id}-note`, `${id}-problem`];
  control.id = id;
  control.name = name;
  attribute(control, "aria-describedby", `${problem} ${note}`);
  attribute(control, "aria-required", isRequired || null);
  const error = h("small", { id: problem, class: "problem", role: "alert" });
  const label = h("label", { htmlFor: control.id }, titleOf(name), isRequired ? " (required)" : "");
  const isCheck = control.type === "checkbox";
  const element = h("div", { class: isCheck ? "field check" : "field" },
    isCheck ? [control, label] : [label, control], error, h("small", { id: note, class: "note" }, noteOf(schema.description)));
  const fail = (message) => {
    text(error, message);
    attribute(control, "aria-invalid", message ? "true" : null);
  };
  control.addEventListener("input", () => fail(""));
  return { element, control, read, write, fail };
}

/**
 * Fields of an object's schema. `first` names those that come first, the others are folded;
 * `hidden` are left out.
 */
export function schemaForm(schema, { first, hidden = [], title = "More options", prefix = "field", controlOf = optionControl }) {
  const names = Object.keys(schema.properties).filter((name) => !hidden.includes(name));
  const ordered = [...first.filter((name) => names.includes(name)), ...names.filter((name) => !first.includes(name))];
  const fields = new Map(ordered.map((name) => [name, makeField(`${prefix}-${name}`, name, schema.properties[name], schema.required?.includes(name), controlOf)]));
  const folded = h("details", { class: "folded" }, h("summary", {}, title));
  const element = h("div", { class: "fields" });
  for (const [name, field] of fields) (first.includes(name) ? element : folded).append(field.element);
  if (folded.children.length > 1) element.append(folded);

  return {
    element,
    fields,
    values: () => {
      const read = [...fields].map(([name, field]) => {
        try { return [name, field.read()]; } catch (error) { throw Object.assign(error, { field: name }); }
      });
      return Object.fromEntries(read.filter(([, value]) => value !== undefined));
    },
    fill: (values) => fields.forEach((field, name) => field.write(values[name])),
    clear: () => fields.forEach((field) => field.fail("")),
    /** Show what is wrong beside its field; false when no field is meant. */
    fail: (error) => {
      const message = error.message.replace(/^body: /, "");
      const name = [error.field, message.split(":", 1)[0]].map((each) => each?.split(".")[0]).find((each) => fields.has(each));
      if (!name) return false;
      const field = fields.get(name);
      if (folded.contains(field.element)) folded.open = true;
      const plain = message.startsWith(`${name}`) ? message.slice(message.indexOf(":") + 1).trim() : message;
      field.fail(plain[0].toUpperCase() + plain.slice(1));
      field.control.focus();
      return true;
    },
  };
}
