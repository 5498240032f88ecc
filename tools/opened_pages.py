"""A browser and its pages, which files of tests share."""

from contextlib import ExitStack

from playwright.sync_api import Browser

from tools.comfy_server import ComfyServer
from tools.web_page import WebPage, chromium


class OpenedPages:
    """A browser, and a page in each language, for several files of tests: the front end loads for seconds.

    While they are open no other event loop runs in this thread.
    """

    def __init__(self) -> None:
        self._stack, self._browser = ExitStack(), None
        self._pages: dict[str, WebPage] = {}

    def browser(self) -> Browser:
        """The browser, which starts when it is first asked for."""
        if self._browser is None:
            self._browser = self._stack.enter_context(chromium())
        return self._browser

    def page(self, server: ComfyServer, language: str = "en") -> WebPage:
        """The page that was in this language from the start, as a new one."""
        if language not in self._pages:
            self._pages[language] = WebPage(self.browser(), server, Comfy_Locale=language)
        return self._pages[language].renew(Comfy_Locale=language)

    def close(self) -> None:
        """The end of the browser and its pages."""
        self._pages.clear()
        self._browser = None
        self._stack.close()
