// What screen readers need and the theme leaves out.
document.addEventListener("DOMContentLoaded", () => {
  // The controls of the navigation that open a part of it have a symbol and no text.
  for (const control of document.querySelectorAll("li.has-children > details > summary")) {
    const page = control.closest("li").querySelector("a");
    if (page && !control.textContent.trim()) control.setAttribute("aria-label", `Pages under ${page.textContent.trim()}`);
  }
  // The parameters of a long signature are a list without terms.
  for (const list of document.querySelectorAll("dt.sig > dl")) {
    list.setAttribute("role", "list");
    for (const entry of list.children) entry.setAttribute("role", "listitem");
  }
});
