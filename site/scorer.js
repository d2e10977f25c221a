// Orders the results of a search. Sphinx adds up points for words; these come on top:
// - pages that are written for readers come before the reference, and the reference before files of the repository,
// - a title that has the words of the query, in any form ("uneven batch", "Uneven batches"), comes before a text that has,
// - a name of the reference that is asked for exactly comes before names that contain it.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  score: (result) => {
    const [page, title, , , score, , kind] = result;
    const query = new URLSearchParams(location.search).get("q") ?? "";
    if (kind === "index") result[2] = ""; // lead to the page, as its other results do, which are then shown once
    if (kind === "object") {
      const isName = /[._]|[a-z][A-Z]/.test(query);
      return score + (isName && `.${title}`.endsWith(`.${query}`) ? 60 : 0);
    }
    const words = Scorer.stems(query);
    const wanted = words.filter((word) => Scorer.stems(title).includes(word)).length;
    const heading = Scorer.stems(title.split(" > ").at(-1));
    const coverage = words.length ? wanted / words.length : 0;
    const precision = heading.length ? Math.min(1, wanted / heading.length) : 0;
    return score + Scorer.weight(page) + 40 * coverage ** 2 + 15 * precision;
  },

  // The points of a page's section.
  weight: (page) => {
    if (/^(project|examples|genindex|py-modindex)/.test(page)) return -20;
    if (/^reference\/(api|tf|tf-names)/.test(page)) return 0;
    return page.startsWith("reference/") ? 5 : 20;
  },

  // The stems of a text's words, without those that every text has.
  stems: (text) => {
    const stemmer = new Stemmer();
    const words = text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) ?? [];
    return words.filter((word) => !stopwords.has(word)).map((word) => stemmer.stemWord(word));
  },
};
