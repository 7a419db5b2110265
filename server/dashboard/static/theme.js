// SPDX-License-Identifier: Apache-2.0
// The chosen colours, before anything is drawn; without a choice, the system's.
"use strict";
{
  const chosen = localStorage.getItem("openenvd-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
}
