//! A Chromium without a window, driven through its pipes by the DevTools protocol.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::{Value, json};

use crate::packages;

/// Longest wait for an answer or an event.
const WAIT: Duration = Duration::from_secs(30);

/// A running browser with one page.
pub(crate) struct Browser {
    child: Child,
    commands: ChildStdin,
    messages: Receiver<Value>,
    /// Events of the page that was opened last.
    events: Vec<Value>,
    /// The number of the last command.
    last: u64,
    session: Option<String>,
}

/// The outcome of opening a page.
pub(crate) struct Opened {
    /// Until the event `load`.
    pub(crate) time: Duration,
    /// The addresses that were fetched.
    pub(crate) fetched: Vec<String>,
    /// Messages of the console, and exceptions.
    pub(crate) complaints: Vec<String>,
}

/// Options of each run. Root has no sandbox; the pages are of this project.
fn options(profile: &Path) -> Vec<String> {
    let mut options: Vec<String> =
        ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"].map(str::to_owned).into();
    // The shared memory of a container is small.
    options.push("--disable-dev-shm-usage".to_owned());
    options.push("--disable-background-networking".to_owned());
    options.push(format!("--user-data-dir={}", profile.display()));
    options
}

fn fresh(folder: &Path) -> anyhow::Result<PathBuf> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("cannot empty {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder.to_owned())
}

/// The address of a file.
pub(crate) fn address(file: &Path) -> String {
    format!("file://{}", file.display())
}

/// Writes a picture of the top of a page, which is `width` by `height` pixels.
pub(crate) fn picture(
    page: &Path,
    to: &Path,
    (width, height): (u32, u32),
    scratch: &Path,
) -> anyhow::Result<()> {
    let profile = fresh(&scratch.join("profile"))?;
    let mut command = Command::new(packages::CHROMIUM.1);
    command.args(options(&profile)).arg("--hide-scrollbars");
    command.arg(format!("--window-size={width},{height}"));
    command.arg(format!("--screenshot={}", to.display())).arg(address(page));
    crate::conformance::quiet(&mut command)?;
    anyhow::ensure!(to.exists(), "the browser made no {}", to.display());
    Ok(())
}

impl Browser {
    /// Starts it, with its files in a folder.
    pub(crate) fn start(scratch: &Path) -> anyhow::Result<Self> {
        let profile = fresh(&scratch.join("profile"))?;
        let said = File::create(scratch.join("browser.out")).context("cannot write browser.out")?;
        // It reads commands from descriptor 3 and writes to 4. Each message ends with a zero.
        let mut command = Command::new("sh");
        command.args(["-c", "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null", "sh"]);
        command.arg(packages::CHROMIUM.1).args(options(&profile));
        command.args(["--remote-debugging-pipe", "--enable-logging=stderr"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(said);
        let mut child = command.spawn().context("cannot run the browser")?;
        let commands = child.stdin.take().expect("it is a pipe");
        let mut output = BufReader::new(child.stdout.take().expect("it is a pipe"));
        let (sender, messages) = mpsc::channel();
        thread::spawn(move || {
            let mut text = Vec::new();
            while output.read_until(0, &mut text).is_ok_and(|length| length > 0) {
                let message = serde_json::from_slice(text.strip_suffix(b"\0").unwrap_or(&text));
                text.clear();
                // Whoever waits for what cannot be read runs out of time.
                if message.is_ok_and(|message| sender.send(message).is_err()) {
                    return;
                }
            }
        });
        let mut browser =
            Self { child, commands, messages, events: Vec::new(), last: 0, session: None };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }))?;
        let target = json!({ "targetId": target["targetId"], "flatten": true });
        let attached = browser.call("Target.attachToTarget", target)?;
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}))?;
        }
        Ok(browser)
    }

    /// Opens a file in a window of this width.
    pub(crate) fn open(&mut self, file: &Path, width: u32) -> anyhow::Result<Opened> {
        let window =
            json!({ "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", window)?;
        self.events.clear();
        let begin = Instant::now();
        let opened = self.call("Page.navigate", json!({ "url": address(file) }))?;
        if let Some(error) = opened["errorText"].as_str() {
            bail!("the browser cannot open {}: {error}", file.display());
        }
        let until = begin + WAIT;
        while !self.events.iter().any(|event| event["method"] == "Page.loadEventFired") {
            let message = self.next(until).context("the page does not load")?;
            self.events.push(message);
        }
        let time = begin.elapsed();
        // What the page does when it is there has happened once it is painted.
        let painted = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))";
        self.evaluate(painted)?;
        let of = |method: &'static str| self.events.iter().filter(move |e| e["method"] == method);
        let fetched = of("Network.requestWillBeSent")
            .map(|event| event["params"]["request"]["url"].as_str().unwrap_or_default().to_owned())
            .collect();
        let complaints = ["Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"]
            .into_iter()
            .flat_map(of)
            .map(|event| event["params"].to_string())
            .collect();
        Ok(Opened { time, fetched, complaints })
    }

    /// Writes a picture of the open page in a window of this width, as far down as a picture may reach.
    pub(crate) fn save_picture(&mut self, to: &Path, width: u32) -> anyhow::Result<()> {
        /// The browser draws no larger ones.
        const HIGHEST: f64 = 16_000.0;
        let sizes = self.call("Page.getLayoutMetrics", json!({}))?;
        let height = sizes["cssContentSize"]["height"].as_f64().unwrap_or_default().min(HIGHEST);
        let clip = json!({ "x": 0, "y": 0, "width": width, "height": height, "scale": 1 });
        let parameters = json!({ "clip": clip, "captureBeyondViewport": true });
        let picture = self.call("Page.captureScreenshot", parameters)?;
        let data = picture["data"].as_str().context("the browser made no picture")?;
        let file = File::create(to).with_context(|| format!("cannot write {}", to.display()))?;
        let mut decode = Command::new("base64");
        decode.arg("--decode").stdin(Stdio::piped()).stdout(file);
        let mut decode = decode.spawn().context("cannot run base64")?;
        decode.stdin.take().expect("it is a pipe").write_all(data.as_bytes())?;
        anyhow::ensure!(decode.wait()?.success(), "the picture is not in base64");
        Ok(())
    }

    /// The value of an expression in the page.
    pub(crate) fn evaluate(&mut self, expression: &str) -> anyhow::Result<Value> {
        let parameters =
            json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let mut answer = self.call("Runtime.evaluate", parameters)?;
        if !answer["exceptionDetails"].is_null() {
            bail!("the expression fails: {}", answer["exceptionDetails"]);
        }
        Ok(answer["result"]["value"].take())
    }

    fn call(&mut self, method: &str, parameters: Value) -> anyhow::Result<Value> {
        self.last += 1;
        let id = self.last;
        let mut command = json!({ "id": id, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            command["sessionId"] = session.clone().into();
        }
        self.commands
            .write_all(format!("{command}\0").as_bytes())
            .with_context(|| format!("the browser does not take {method}"))?;
        let until = Instant::now() + WAIT;
        loop {
            let mut message = self
                .next(until)
                .with_context(|| format!("the browser does not answer {method}"))?;
            if message["id"] != id {
                self.events.push(message);
                continue;
            }
            if !message["error"].is_null() {
                bail!("the browser refuses {method}: {}", message["error"]);
            }
            return Ok(message["result"].take());
        }
    }

    fn next(&self, until: Instant) -> anyhow::Result<Value> {
        let left = until.saturating_duration_since(Instant::now());
        Ok(self.messages.recv_timeout(left)?)
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The browser ends its own children, and they their files.
        let _ = self.call("Browser.close", json!({}));
        let end = Instant::now() + Duration::from_secs(5);
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > end {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}
