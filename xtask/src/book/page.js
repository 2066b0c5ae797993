// What a reader sees of a page of the book, measured in the browser.
(() => {
	const all = (selector) => [...document.querySelectorAll(selector)];
	const scrolls = (element) =>
		element.scrollWidth > element.clientWidth + 1 && /auto|scroll/.test(getComputedStyle(element).overflowX);
	// On a phone, code and tables may have more columns than the window, and scroll by themselves.
	const may_scroll = innerWidth < 1080 ? "pre, pre *, .table-wrapper" : ":not(*)";
	const root = document.documentElement;
	return {
		window: innerWidth,
		content: root.scrollWidth,
		scrolling: all("body, body *").filter((element) => scrolls(element) && !element.matches(may_scroll))
			.map((element) => `${element.tagName} ${element.className}`),
		unloaded: all("img").filter((image) => !image.complete || image.naturalWidth === 0).map((image) => image.src),
		links: all("a[href]").map((link) => link.href),
	};
})()
