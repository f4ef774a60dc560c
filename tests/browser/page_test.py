"""page_test.py NANOVLLM DIRECTORY: the web page in Chromium, as its users meet it. Screenshots go to DIRECTORY."""
import json
import re
import shutil
import subprocess
import sys
import unittest
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

PROGRAM, SHOTS = sys.argv[1], Path(sys.argv[2])
DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
KEY = "a secret of the test"

HOSTILE = """# A heading
**bold** and `a < b`, [good](https://example.org/?a=1&b=2), [bad](javascript:window.ran=1), [data](data:text/html,x)
<img src=x onerror="window.ran=2"><script>window.ran=3</script> ![image](https://example.org/x.png)

| a | b |
|---|---|
| 1 | **2** |

- one
- two

```python
def f():
    return "<script>window.ran=4</script>"
```

<script>window.ran=5</script>
<svg onload="window.ran=6"></svg>
"""

# The server's part in a conversation whose answer is the test's: in pieces, as a stream brings it.
WIDE = """
| one | two | three | four | five | six | seven | eight |
|---|---|---|---|---|---|---|---|
| monday | tuesday | wednesday | thursday | friday | saturday | sunday | holiday |
"""

ANSWER = """
const bytes = new TextEncoder(), pieces = arguments[0].match(/[^]{1,9}/g), field = arguments[1] ?? 'content', fetched = window.fetch;
window.fetch = async (path, options) => {
  if (!path.endsWith('completions')) return fetched(path, options);
  window.asked = JSON.parse(options.body);
  const event = (json) => bytes.encode('data: ' + JSON.stringify(json) + '\\n\\n');
  return new Response(new ReadableStream({async start(stream) {
    for (const piece of pieces) {
      if (options.signal.aborted) return stream.error(options.signal.reason);
      stream.enqueue(event({choices: [{delta: {[field]: piece}}]}));
      await new Promise((done) => setTimeout(done, 2));
    }
    stream.enqueue(event({choices: [], usage: {prompt_tokens: 5, completion_tokens: pieces.length}}));
    stream.close();
  }}));
};
"""

# The numbers of the engine's view meanwhile: a glance from outside may come too late.
SEEN = """
window.seen = Object.fromEntries(['#tile-batch dd', '#tile-speed dd', '#tile-shared dd', '.sequence .phase'].map((name) => [name, new Set()]));
new MutationObserver(() => {
  for (const [name, set] of Object.entries(seen)) set.add(document.querySelector(name)?.textContent);
}).observe(document.getElementById('engine'), {subtree: true, childList: true, characterData: true});
"""

# The faults that axe-core would find first: controls without names, ids twice, text of too little contrast.
ACCESSIBILITY = """
const problems = [];
const seen = (e) => e.checkVisibility({checkOpacity: true, checkVisibilityCSS: true}) && e.getClientRects().length > 0;
for (const e of document.querySelectorAll('button, input, textarea, summary, canvas, [tabindex="0"]')) {
  if (!seen(e)) continue;
  const name = e.getAttribute('aria-label') || e.textContent.trim() || [...(e.labels ?? [])].map((l) => l.textContent.trim()).join();
  if (!name && !e.closest('[aria-hidden]')) problems.push('no name: ' + e.outerHTML.slice(0, 80));
}
const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);
for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) problems.push('id twice: ' + id);
for (const name of ['aria-controls', 'aria-describedby', 'for'])
  for (const e of document.querySelectorAll(`[${name}]`))
    if (!document.getElementById(e.getAttribute(name))) problems.push(`${name} leads nowhere: ${e.getAttribute(name)}`);
if (!document.documentElement.lang) problems.push('no language');
const paint = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const rgb = (colours) => {  // painted one over the other, the lowest first
  paint.fillStyle = '#fff';
  for (const colour of ['#fff', ...colours]) paint.fillStyle = colour, paint.fillRect(0, 0, 1, 1);
  return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
};
const luminance = (c) => {
  const [r, g, b] = c.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node; (node = texts.nextNode());) {
  const e = node.parentElement;
  if (!node.data.trim() || !seen(e) || e.closest('.hidden, .skip, script, style, :disabled')) continue;
  const grounds = [];
  for (let at = e; at; at = at.parentElement) grounds.unshift(getComputedStyle(at).backgroundColor);
  const ground = luminance(rgb(grounds)), text = luminance(rgb([...grounds, getComputedStyle(e).color]));
  const ratio = (Math.max(ground, text) + 0.05) / (Math.min(ground, text) + 0.05);
  if (ratio < 4.5) problems.push(`contrast ${ratio.toFixed(2)}: ${node.data.trim().slice(0, 40)}`);
}
return problems;
"""


class Server:
    """The program on the demo model, on a port of its own."""

    def __init__(self, *options):
        command = [PROGRAM, "serve", str(DEMO), "--port", "0", "--device", "cpu", "--threads", "1", "--served-model-name", "demo"]
        self.process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if found := re.search(r"serving .* on (http://\S+)", line):
                self.url = found[1]
                break

    def stop(self):
        self.process.terminate()
        self.process.stderr.close()
        self.process.wait()


@contextmanager
def browser(url, width=1400, height=900, dark=False):
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={width},{height}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        if width < 600:
            screen = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": True}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        driver.get(url)
        yield driver
        bad = [line for line in driver.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]
        assert not bad, bad
    finally:
        driver.quit()


class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--num-gpu-blocks-override", "96", "--block-size", "16", "--max-model-len", "1024")

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def wait(self, driver, what, seconds=120):
        return WebDriverWait(driver, seconds, 0.05).until(lambda _: what())

    def find(self, driver, selector):
        return driver.find_element(By.CSS_SELECTOR, selector)

    def texts(self, driver, selector):
        # In one go: the page replaces its elements while an answer comes.
        return driver.execute_script("return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText.trim())", selector)

    def ask(self, driver, text):
        answers = len(self.texts(driver, ".assistant .stats"))
        self.find(driver, "#input").send_keys(text, Keys.ENTER)
        self.wait(driver, lambda: len(self.texts(driver, ".assistant .stats")) > answers)
        return self.texts(driver, ".assistant .text")[-1]

    def test_a_conversation_lasts_and_can_be_changed(self):
        with browser(self.server.url) as driver:
            self.assertIn("82", self.ask(driver, "What is 37 + 45?"))
            self.assertIn("7", self.ask(driver, "What is 3 + 4?"))
            self.assertRegex(self.texts(driver, ".stats")[0], r"\d+ prompt tokens.* \d+ tokens.*first after")
            driver.refresh()
            self.wait(driver, lambda: len(self.texts(driver, ".message")) == 4)
            self.assertIn("82", self.texts(driver, ".assistant .text")[0])
            driver.find_elements(By.XPATH, "//button[text()='Edit']")[1].click()
            field = self.find(driver, ".message textarea")
            field.send_keys(Keys.CONTROL, "a")
            field.send_keys("What is 5 + 4?", Keys.ENTER)
            self.wait(driver, lambda: self.texts(driver, ".user .text")[-1] == "What is 5 + 4?" and len(self.texts(driver, ".stats")) == 2)
            self.assertIn("9", self.texts(driver, ".assistant .text")[-1])
            driver.find_elements(By.XPATH, "//button[text()='Regenerate']")[0].click()
            self.wait(driver, lambda: len(self.texts(driver, ".message")) == 2 and len(self.texts(driver, ".stats")) == 1)
            self.find(driver, "#new-chat").click()
            self.assertEqual(self.texts(driver, ".message"), [])
            self.ask(driver, "Hello!")
            self.assertEqual(self.texts(driver, ".chat"), ["Hello!", "What is 37 + 45?"])

    def test_conversations_of_two_tabs_are_all_kept(self):
        with browser(self.server.url) as driver:
            self.ask(driver, "What is 1 + 2?")
            first = driver.current_window_handle
            driver.switch_to.new_window("tab")
            driver.get(self.server.url)
            self.wait(driver, lambda: len(self.texts(driver, ".message")) == 2)
            self.find(driver, "#new-chat").click()
            self.ask(driver, "What is 3 + 4?")
            driver.switch_to.window(first)
            self.wait(driver, lambda: self.texts(driver, ".chat") == ["What is 1 + 2?", "What is 3 + 4?"])
            self.ask(driver, "What is 5 + 6?")
            driver.refresh()
            self.wait(driver, lambda: self.texts(driver, ".chat") == ["What is 1 + 2?", "What is 3 + 4?"])
            self.assertEqual(len(self.texts(driver, ".message")), 4)

    def test_stop_ends_the_answer_and_keeps_what_came(self):
        with browser(self.server.url) as driver:
            driver.execute_script("arguments[0].open = true", self.find(driver, "#settings"))
            self.find(driver, "#temperature").send_keys("1")
            driver.execute_script(ANSWER, "word " * 200000)  # many minutes
            self.find(driver, "#input").send_keys("Go on", Keys.ENTER)
            self.wait(driver, lambda: "word" in "".join(self.texts(driver, ".assistant .text")[-1:]))
            self.find(driver, "#stop").click()
            self.wait(driver, lambda: self.find(driver, "#send").is_displayed())
            self.assertIn("stopped", self.texts(driver, ".stats")[-1])
            self.assertLess(len(self.texts(driver, ".assistant .text")[-1]), 900000)
            self.assertFalse(self.find(driver, "#problem").is_displayed())

    def test_an_answer_is_text_whatever_it_says(self):
        with browser(self.server.url) as driver:
            driver.execute_script(ANSWER, HOSTILE)
            text = self.ask(driver, "Attack")
            self.assertIn('<img src=x onerror="window.ran=2">', text)
            self.assertIn("<script>window.ran=5</script>", text)
            driver.refresh()  # and from what was kept
            self.wait(driver, lambda: self.texts(driver, ".hljs-keyword"))
            self.assertEqual(self.texts(driver, ".assistant .hljs-keyword"), ["def", "return"])
            self.assertEqual(self.texts(driver, ".assistant td"), ["1", "2"])
            self.assertEqual(self.texts(driver, ".assistant strong"), ["bold", "2"])
            links = [e.get_attribute("href") for e in driver.find_elements(By.CSS_SELECTOR, ".assistant a")]
            self.assertEqual(links, ["https://example.org/?a=1&b=2", "https://example.org/x.png"])
            for forbidden in ("img", "script", "svg", "[onerror]", "[onload]", "iframe"):
                self.assertEqual(driver.find_elements(By.CSS_SELECTOR, f".assistant {forbidden}"), [], forbidden)
            self.assertIsNone(driver.execute_script("return window.ran ?? null"))
            # The policy refuses markup from text even where code would ask for it.
            refused = "try { document.createElement('p').innerHTML = '<b>x'; return false; } catch { return true; }"
            self.assertTrue(driver.execute_script(refused))
            driver.get_log("browser")  # it says so

    def test_reasoning_is_shown_under_either_of_its_names(self):
        for name in ("reasoning", "reasoning_content"):
            with browser(self.server.url) as driver:
                driver.execute_script(ANSWER, "Hm, let me see.", name)
                self.ask(driver, "Why?")
                self.assertEqual(driver.execute_script("return document.querySelector('.reasoning .plain')?.textContent"), "Hm, let me see.")
                self.ask(driver, "And then?")  # templates show a model what it thought before its calls
                self.assertEqual(driver.execute_script("return asked.messages[1].reasoning"), "Hm, let me see.")

    def test_code_is_coloured_by_a_highlighter_that_comes_late(self):
        with browser(self.server.url) as driver:
            driver.execute_cdp_cmd("Network.enable", {})
            slow = {"offline": False, "latency": 2000, "downloadThroughput": -1, "uploadThroughput": -1}
            driver.execute_cdp_cmd("Network.emulateNetworkConditions", slow)
            driver.execute_script(ANSWER, HOSTILE)
            self.ask(driver, "Attack")
            self.wait(driver, lambda: self.texts(driver, ".hljs-keyword"))
            self.assertEqual(self.texts(driver, ".assistant .hljs-keyword"), ["def", "return"])

    def test_tokens_show_their_log_probabilities(self):
        with browser(self.server.url) as driver:
            driver.execute_script("arguments[0].open = true", self.find(driver, "#settings"))
            self.find(driver, "#logprobs").click()
            self.find(driver, "#seed").send_keys("3")
            self.ask(driver, "Tell me a story.")
            tokens = driver.find_elements(By.CSS_SELECTOR, ".token")
            self.assertGreater(len(tokens), 5)
            ActionChains(driver).move_to_element(tokens[3]).perform()
            self.wait(driver, lambda: self.find(driver, "#tip").is_displayed())
            self.assertIn("log probability", self.find(driver, "#tip").text)
            self.assertEqual(len(self.texts(driver, "#tip tr")), 5)
            driver.execute_script("arguments[0].focus()", tokens[0])
            ActionChains(driver).send_keys(Keys.ARROW_RIGHT).perform()
            self.assertEqual(driver.switch_to.active_element, tokens[1])
            driver.save_screenshot(str(SHOTS / "tokens.png"))
            driver.find_element(By.XPATH, "//button[text()='Show text']").click()
            self.assertEqual(driver.find_elements(By.CSS_SELECTOR, ".token"), [])

    def test_calls_of_tools_are_shown_and_answered(self):
        integer = {"type": "integer"}
        parameters = {"type": "object", "properties": {"a": integer, "op": {"type": "string"}, "b": integer}, "required": ["a", "op", "b"]}
        with browser(self.server.url) as driver:
            driver.execute_script("arguments[0].open = true", self.find(driver, "#settings"))
            tools = self.find(driver, "#tools")
            tools.send_keys("[", Keys.TAB)
            self.find(driver, "#input").send_keys("What is 127 * 7?", Keys.ENTER)
            self.wait(driver, lambda: "Settings, tools: " in self.find(driver, "#problem").text)
            tools.clear()
            tools.send_keys(json.dumps([{"type": "function", "function": {"name": "calculator", "parameters": parameters}}]), Keys.TAB)
            self.ask(driver, "What is 127 * 7?")
            [name, arguments] = self.texts(driver, ".calls code")[0].rstrip(")").split("(")
            self.assertEqual([name, json.loads(arguments)], ["calculator", {"a": 127, "op": "*", "b": 7}])
            self.assertEqual(driver.execute_script(ACCESSIBILITY), [])
            driver.save_screenshot(str(SHOTS / "calls.png"))
            self.find(driver, ".calls input").send_keys("889", Keys.ENTER)
            self.wait(driver, lambda: self.texts(driver, ".assistant .text")[-1] == "127 * 7 = 889.")
            self.assertEqual(self.texts(driver, ".tool .text"), ["889"])
            self.assertEqual(driver.find_elements(By.CSS_SELECTOR, ".calls input"), [])
            driver.refresh()
            self.wait(driver, lambda: self.texts(driver, ".assistant .text")[-1:] == ["127 * 7 = 889."])

    def shows_work(self, driver):
        """Whether SEEN has all that a load shows; one that was over between two updates is sent again."""
        seen = driver.execute_script("return Object.fromEntries(Object.entries(seen).map(([name, set]) => [name, [...set].filter(Boolean)]))")
        tiles = all(set(seen[f"#tile-{name} dd"]) - {"–", "0", "0, 0"} for name in ("batch", "speed", "shared"))
        if tiles and "decode" in seen[".sequence .phase"]:
            return True
        if (button := self.find(driver, "#load")).is_enabled():
            button.click()
        return False

    def test_the_engine_is_seen_at_work(self):
        for dark, width in ((False, 1400), (True, 1400), (False, 390)):
            with self.subTest(dark=dark, width=width), browser(self.server.url, width, dark=dark) as driver:
                self.find(driver, "#engine-button").click()
                picture = "return document.getElementById('blocks').toDataURL()"
                self.wait(driver, lambda: "steps" in self.find(driver, "#engine-state").text)
                # Rates look a second back: the load may be over before the first one else.
                self.wait(driver, lambda: self.find(driver, "#tile-speed dd").text != "–")
                before = driver.execute_script(picture)
                driver.execute_script(SEEN)
                self.find(driver, "#load").click()
                self.wait(driver, lambda: driver.execute_script(picture) != before)
                driver.save_screenshot(str(SHOTS / f"engine-{width}{'-dark' if dark else ''}.png"))
                self.wait(driver, lambda: self.shows_work(driver))
                self.wait(driver, lambda: self.find(driver, "#load").is_enabled())
                self.wait(driver, lambda: self.find(driver, "#tile-batch dd").text == "0, 0")
                self.find(driver, "#blocks").send_keys(Keys.ARROW_RIGHT)
                self.assertRegex(self.find(driver, "#block-text").text, r"Block 0: \w+")

    def test_nothing_is_asked_for_when_nobody_looks(self):
        with browser(self.server.url) as driver:
            live = "return performance.getEntriesByType('resource').filter((e) => e.name.includes('/engine/live')).length"
            self.ask(driver, "What is 1 + 1?")
            self.assertEqual(driver.execute_script(live), 0)

    def test_a_key_is_asked_for_and_sent_in_a_header(self):
        server = Server("--api-key", KEY)
        try:
            with browser(server.url) as driver:
                self.wait(driver, lambda: self.find(driver, "#key").is_displayed())
                self.assertIn("key", self.find(driver, "#problem").text)
                self.find(driver, "#key").send_keys(KEY, Keys.TAB)
                self.wait(driver, lambda: self.find(driver, "#model").text == "demo")
                self.assertIn("7", self.ask(driver, "What is 3 + 4?"))
                self.assertEqual(driver.execute_script("return sessionStorage.getItem('nanovllm.key')"), KEY)
                self.assertNotIn(KEY, json.dumps(driver.execute_script("return {...localStorage}")))
                urls = driver.execute_script("return performance.getEntriesByType('resource').map((e) => e.name).join()")
                self.assertNotIn("secret", urls + driver.current_url)
                driver.get_log("browser")  # the first answer was a 401, as it should be
        finally:
            server.stop()

    def test_everyone_can_use_it(self):
        for dark, width in ((False, 1400), (True, 1400), (False, 390), (True, 390)):
            with self.subTest(dark=dark, width=width), browser(self.server.url, width, 844, dark) as driver:
                driver.execute_script(ANSWER, HOSTILE + WIDE)
                self.ask(driver, "Show everything")
                self.wait(driver, lambda: self.texts(driver, ".hljs-keyword"))
                driver.save_screenshot(str(SHOTS / f"chat-{width}{'-dark' if dark else ''}.png"))
                self.assertEqual(driver.execute_script(ACCESSIBILITY), [])
                fits = "return document.documentElement.scrollWidth <= innerWidth"
                self.assertTrue(driver.execute_script(fits))
                whole = "return [...document.querySelectorAll('.text td')].every((cell) => cell.clientHeight < 50)"
                self.assertTrue(driver.execute_script(whole))  # a table scrolls: no word of it is broken
                if width < 600:
                    self.find(driver, "#menu").click()
                driver.execute_script("arguments[0].open = true", self.find(driver, "#settings"))
                self.assertEqual(driver.execute_script(ACCESSIBILITY), [])
                if width < 600:
                    self.find(driver, "#menu").click()
                self.find(driver, "#engine-button").click()
                self.wait(driver, lambda: "steps" in self.find(driver, "#engine-state").text)
                self.assertEqual(driver.execute_script(ACCESSIBILITY), [])
                self.assertTrue(driver.execute_script(fits))

    def test_it_is_used_by_keyboard_alone(self):
        with browser(self.server.url) as driver:
            reached = []
            for _ in range(40):
                ActionChains(driver).send_keys(Keys.TAB).perform()
                active = driver.switch_to.active_element
                if active.tag_name == "body":
                    break
                outline = active.value_of_css_property("outline-style")
                self.assertNotEqual(outline, "none", active.get_attribute("outerHTML")[:80])
                reached.append(active.get_attribute("id") or active.get_attribute("class"))
            for name in ("new-chat", "chat", "remove", "messages", "input", "send", "engine-button"):
                self.assertIn(name, reached)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
