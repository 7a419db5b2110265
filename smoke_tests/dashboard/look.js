// SPDX-License-Identifier: Apache-2.0
// Questions of the tests about a page, of which this is an initial script.
window.look = {
  seen: new Set(),

  // The elements that are wider than the page, which then scrolls sideways.
  tooWide: () => document.documentElement.scrollWidth <= innerWidth ? [] :
    [...document.querySelectorAll("body *")]
      .filter(each => each.getBoundingClientRect().right > innerWidth + 1)
      .map(each => each.outerHTML.slice(0, 120)).slice(0, 5),

  // Whether the figures of a rollout have changed several times.
  moves() {
    this.seen.add(document.querySelector("dl.tiles").innerText);
    return this.seen.size > 3;
  },

  hasAges: () => [...document.querySelectorAll("td.number [data-since]")].every(each => each.textContent),

  // The rows of the buttons that a table cuts off.
  cutOff: () => [...document.querySelectorAll(".scroll button:not([hidden])")]
    .filter(each => each.getBoundingClientRect().right > 1 +
      each.closest(".scroll").getBoundingClientRect().right)
    .map(each => each.closest("tr").innerText),

  focused() {
    const element = document.activeElement;
    return element.getAttribute("aria-label") ?? element.innerText ?? "";
  },

  isOutlined() {
    const { outlineStyle, outlineWidth, boxShadow } = getComputedStyle(document.activeElement);
    return (outlineStyle !== "none" && outlineWidth !== "0px") || boxShadow !== "none";
  },

  // Whether the style has the rule that a replaced daemon adds.
  hasOtherFiles: () => [...document.styleSheets].some(
    sheet => [...sheet.cssRules].some(rule => rule.selectorText === ".another")),

  // Pretend that the window is hidden or seen: Playwright cannot hide a page.
  hide(isHidden) {
    Object.defineProperty(document, "hidden", {value: isHidden, configurable: true});
    document.dispatchEvent(new Event("visibilitychange"));
  },

  streams: () => performance.getEntriesByType("resource").map(each => each.name)
    .filter(each => each.includes("/v1/dashboard/stream")),
};
