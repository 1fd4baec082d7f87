// What the theme leaves out for readers who use a keyboard or hear the page.
addEventListener("DOMContentLoaded", () => {
  for (const caption of document.querySelectorAll('.caption[role="heading"]')) caption.setAttribute("aria-level", "2");
  for (const wide of document.querySelectorAll("pre, table.docutils, div.math, .toctree-wrapper")) {
    if (wide.scrollWidth > wide.clientWidth) wide.setAttribute("tabindex", "0");
  }
  for (const block of document.querySelectorAll("div.highlight")) addCopyButton(block);
});

// The lines to type, without prompts and output, if a block has prompts; otherwise all.
function typed(code) {
  const lines = code.split("\n");
  const prompt = /^(?:>>>|\.\.\.|\$)(?: |$)/;
  if (!prompt.test(lines[0])) return code;
  return lines.filter((line) => prompt.test(line)).map((line) => line.replace(prompt, "")).join("\n") + "\n";
}

function addCopyButton(block) {
  if (!navigator.clipboard) return; // absent on pages served by plain HTTP
  const button = document.createElement("button");
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(typed(block.querySelector("pre").textContent));
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  block.append(button);
}
