// SPDX-License-Identifier: Apache-2.0
// What a panel shows, and how it looks. Facts of deaths are left out: without cgroups the evidence is
// different.
(panel) => {
  const LOOKS = ["color", "backgroundColor", "borderLeftColor", "fill", "stroke", "fontSize"];
  const root = document.querySelector(panel);
  const twelfths = (pixels) => Math.round((12 * pixels) / innerWidth);
  const words = (each) => each.innerText.replace(/\d[\d.,]*/g, "0").replace(/\s+/g, " ").trim();
  const named = (each) => each.tagName.toLowerCase() +
    (each.id && !/\d/.test(each.id) ? `#${each.id}` : "") +
    [...each.classList].map((name) => `.${name}`).join("") +
    ["tone", "part"].map((key) => (each.dataset[key] ? `[${each.dataset[key]}]` : "")).join("");
  const path = (each) => (each === root ? "" : `${path(each.parentElement)} ${named(each)}`);
  const isSeen = (each) => each.checkVisibility() && !each.closest(".unseen, dialog, .skip");
  const shows = [];
  for (const each of root.querySelectorAll(
    "section, figure, h2, thead th, dt, figcaption, label, legend, summary, a.button, button")) {
    if (!isSeen(each) || each.closest("tbody, #faults dl")) continue;
    const { x, width } = each.getBoundingClientRect();
    const isBox = each.matches("section, figure");
    const place = `at ${twelfths(x)}/12, ${twelfths(width)}/12 wide`;
    shows.push(isBox ? `${named(each)} ${place}` : `${each.tagName.toLowerCase()} ${words(each)}`);
  }
  const looks = {};
  for (const each of root.querySelectorAll("*")) {
    if (!isSeen(each)) continue;
    const style = getComputedStyle(each);
    const look = LOOKS.map((name) => style[name]).join(" ");
    const known = (looks[path(each).trim()] ??= []);
    if (!known.includes(look)) known.push(look);
  }
  return { shows, looks };
}
