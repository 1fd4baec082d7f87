// What the theme leaves out for readers who use a keyboard or hear the page.
addEventListener("DOMContentLoaded", () => {
  for (const caption of document.querySelectorAll('.caption[role="heading"]')) caption.setAttribute("aria-level", "2");
  for (const wide of document.querySelectorAll("pre, table.docutils, div.math, .toctree-wrapper")) {
    if (wide.scrollWidth > wide.clientWidth) wide.setAttribute("tabindex", "0");
  }
});
