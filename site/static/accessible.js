// Names the controls of the navigation that open a part of it, which have a symbol and no text.
document.addEventListener("DOMContentLoaded", () => {
  for (const control of document.querySelectorAll("li.has-children > details > summary")) {
    const page = control.closest("li").querySelector("a");
    if (page && !control.textContent.trim()) control.setAttribute("aria-label", `Pages under ${page.textContent.trim()}`);
  }
});
