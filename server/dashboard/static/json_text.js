// SPDX-License-Identifier: Apache-2.0
// JSON values as text: indented, with what is short on one line.

const LINE = 88;

/** The value as text; what fits a line is on one. */
export function pretty(value, indent = "") {
  const flat = JSON.stringify(value, null, 1).replaceAll(/\n */g, " "); // a text has no line breaks
  if (value === null || typeof value !== "object" || indent.length + flat.length <= LINE) {
    return flat;
  }
  const deeper = `${indent}  `;
  if (Array.isArray(value)) {
    return value.every((item) => item === null || typeof item !== "object")
      ? wrapped(value, indent, deeper)
      : `[\n${value.map((item) => deeper + pretty(item, deeper)).join(",\n")}\n${indent}]`;
  }
  const fields = Object.entries(value).map(
    ([name, item]) => `${deeper}${JSON.stringify(name)}: ${pretty(item, deeper)}`,
  );
  return `{\n${fields.join(",\n")}\n${indent}}`;
}

function wrapped(items, indent, deeper) {
  const lines = [];
  let line = deeper;
  for (const item of items.map((each) => JSON.stringify(each))) {
    if (line.length > deeper.length && line.length + item.length > LINE) {
      lines.push(line.trimEnd());
      line = deeper;
    }
    line += `${item}, `;
  }
  lines.push(line.replace(/, $/, ""));
  return `[\n${lines.join("\n")}\n${indent}]`;
}
