// Fills the list of versions from versions.json, which stands beside the folders of the versions. Where there is none,
// as in a site that is opened from a disk, the list stays hidden.
document.addEventListener("DOMContentLoaded", async () => {
  const list = document.getElementById("versions");
  const root = document.documentElement.dataset.content_root;
  if (!list || !root || location.protocol === "file:") return;
  try {
    const home = new URL(root, location.href);
    const answer = await fetch(new URL("../versions.json", home));
    if (!answer.ok) return;
    const page = location.href.slice(home.href.length);
    for (const { name, version } of await answer.json()) {
      const option = new Option(name, new URL(`../${version}/`, home).href);
      option.selected = home.pathname.endsWith(`/${version}/`);
      list.add(option);
    }
    list.addEventListener("change", async () => {
      const there = new URL(page, list.value);
      const found = await fetch(there, { method: "HEAD" }).catch(() => ({ ok: false }));
      location.href = found.ok ? there : list.value;
    });
    list.parentElement.hidden = false;
  } catch {
    return;
  }
});
