// SPDX-License-Identifier: Apache-2.0
// Pages whose modules and style are loaded when one of them is first shown.

import { h } from "./dom.js";

let styled = null;

/** Load the style of pages; once. */
export function style() {
  styled ??= new Promise((loaded) => {
    const link = h("link", { rel: "stylesheet", href: new URL("pages.css", import.meta.url).href, onload: loaded, onerror: loaded });
    document.head.append(link);
  });
  return styled;
}

/** A page of `panels/<id>.js`. */
export function later(id, title, kinds) {
  return {
    id: `page-${id}`, title, kinds,
    mount(body, app, argument) {
      let page = null;
      let isGone = false;
      Promise.all([import(`./panels/${id}.js`), style()]).then(([found]) => {
        if (isGone) return;
        page = found.default.mount(body, app, argument);
        if (app.store.one("daemon")) page.update?.(new Set(kinds));
      }, (error) => app.say(`This page could not be loaded: ${error.message}`));
      return {
        update: (changed) => page?.update?.(changed),
        tick: (now) => page?.tick?.(now),
        unmount() { isGone = true; page?.unmount?.(); },
      };
    },
  };
}
