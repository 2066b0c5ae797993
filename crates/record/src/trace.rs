//! Events in time, in the format of Chrome's traces (JSON array), which Perfetto and chrome://tracing read.
//!
//! Each event is a line. The array has no end, which readers allow: so several processes can append, and a process that is
//! killed leaves a whole file. Times are those of the host's monotonic clock, one for all processes.

use std::fmt::{self, Write as _};
use std::io;
use std::path::Path;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::{SharedFile, path_for_process, process};

/// The first line of the file.
const HEADER: &[u8] = b"[\n";

/// A trace being written. Each event is one write at the end of the file.
#[derive(Debug)]
pub struct Trace {
    file: SharedFile,
    /// The process has told its name.
    named: Once,
    /// Spans so far.
    spans: AtomicU64,
}

/// A moment, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment(u64);

impl Moment {
    /// This one.
    #[must_use]
    pub fn now() -> Self {
        let now = clock_gettime(ClockId::Monotonic);
        Self(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
    }

    /// The moment so long before this one.
    #[must_use]
    pub fn before(self, time: Duration) -> Self {
        Self(self.0.saturating_sub(time.as_nanos() as u64))
    }
}

/// A span that has begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    id: u64,
    name: String,
}

impl Trace {
    /// Opens the file that this path means in this process ([`path_for_process`]). It begins anew, unless another process
    /// writes it now.
    ///
    /// # Errors
    /// Those of [`SharedFile::open`].
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = SharedFile::open(&path_for_process(path), "trace", HEADER)?;
        Ok(Self { file, named: Once::new(), spans: AtomicU64::new(0) })
    }

    /// Names a track of this process.
    pub fn name_track(&self, track: u32, name: &str) {
        let metadata = |what: &str, track: u32, name: &str| {
            let args = Object::default().text("name", name);
            self.write(
                &Object::default()
                    .text("ph", "M")
                    .text("name", what)
                    .at(track)
                    .object("args", &args),
            );
        };
        self.named.call_once(|| metadata("process_name", 0, &process()));
        metadata("thread_name", track, name);
    }

    /// A span begins. Spans may overlap, and end in any order.
    pub fn begin(&self, track: u32, name: String, args: &Object) -> Span {
        let span = Span { id: self.spans.fetch_add(1, Ordering::Relaxed), name };
        self.span("b", track, &span, args);
        span
    }

    /// A span ends.
    pub fn end(&self, track: u32, span: &Span, args: &Object) {
        self.span("e", track, span, args);
    }

    fn span(&self, phase: &str, track: u32, span: &Span, args: &Object) {
        let id = Object::default().number("local", span.id);
        let event =
            Object::default().text("ph", phase).text("cat", "work").text("name", &span.name);
        let event = event.object("id2", &id).at(track).moment("ts", Moment::now());
        self.write(&event.object("args", args));
    }

    /// Something happens.
    pub fn instant(&self, track: u32, kind: &str, name: &str, args: &Object) {
        let event =
            Object::default().text("ph", "i").text("s", "t").text("cat", kind).text("name", name);
        self.write(&event.at(track).moment("ts", Moment::now()).object("args", args));
    }

    /// Something lasted until now. Such do not overlap on a track.
    pub fn lasted(&self, track: u32, kind: &str, name: &str, since: Moment) {
        let lasted = Moment(Moment::now().0.saturating_sub(since.0));
        let event =
            Object::default().text("ph", "X").text("cat", kind).text("name", name).at(track);
        self.write(&event.moment("ts", since).moment("dur", lasted));
    }

    fn write(&self, event: &Object) {
        self.file.append(format!("{event},\n").as_bytes());
    }
}

/// A JSON object.
#[derive(Clone, Debug, Default)]
pub struct Object(String);

impl Object {
    /// Adds a text.
    #[must_use]
    pub fn text(mut self, key: &str, value: &str) -> Self {
        self.key(key);
        self.0.push('"');
        for c in value.chars() {
            match c {
                '"' | '\\' => self.0.extend(['\\', c]),
                // JSON has no control characters in a text.
                c if c.is_control() => self.0.push('?'),
                c => self.0.push(c),
            }
        }
        self.0.push('"');
        self
    }

    /// Adds a number.
    #[must_use]
    pub fn number(self, key: &str, value: impl Into<u64>) -> Self {
        let value = value.into();
        self.value(key, format_args!("{value}"))
    }

    /// Adds a truth.
    #[must_use]
    pub fn flag(self, key: &str, value: bool) -> Self {
        self.value(key, format_args!("{value}"))
    }

    fn object(self, key: &str, value: &Self) -> Self {
        self.value(key, format_args!("{value}"))
    }

    /// Process and track.
    fn at(self, track: u32) -> Self {
        self.number("pid", std::process::id()).number("tid", track)
    }

    /// A time, in the unit of the format: microseconds.
    fn moment(self, key: &str, moment: Moment) -> Self {
        self.value(key, format_args!("{}.{:03}", moment.0 / 1000, moment.0 % 1000))
    }

    fn key(&mut self, key: &str) {
        let comma = if self.0.is_empty() { "" } else { "," };
        self.0.extend([comma, "\"", key, "\":"]);
    }

    fn value(mut self, key: &str, value: fmt::Arguments<'_>) -> Self {
        self.key(key);
        // Writing to a String cannot fail.
        let _ = write!(self.0, "{value}");
        self
    }
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{}}}", self.0)
    }
}

/// Begins a trace that other processes write, as [`capture::begin`](crate::capture::begin) does.
///
/// # Errors
/// As there.
pub fn begin(path: &Path) -> io::Result<Option<SharedFile>> {
    SharedFile::begin(path, "trace", HEADER)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn each_event_is_a_line_of_an_array() {
        let path = std::env::temp_dir().join(format!("anyverbs-trace-{}", std::process::id()));
        let trace = Trace::create(&path).unwrap();
        trace.name_track(17, "QP 17 \"RC\"");
        trace.name_track(18, "QP 18");
        let span = trace.begin(17, "SEND".into(), &Object::default().number("wr_id", u64::MAX));
        trace.instant(17, "packet", "RC_SEND_ONLY", &Object::default().text("a", "\\ \" \n"));
        trace.lasted(17, "wait", "waits for credit", Moment::now());
        trace.end(17, &span, &Object::default().text("status", "IBV_WC_SUCCESS"));
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let closed = format!("{}]", text.trim_end().trim_end_matches(','));
        let events: Vec<Value> = serde_json::from_str(&closed).unwrap();
        let phases: Vec<_> = events.iter().map(|event| event["ph"].as_str().unwrap()).collect();
        assert_eq!(phases, ["M", "M", "M", "b", "i", "X", "e"]);
        assert_eq!(events[3]["id2"], events[6]["id2"]);
        assert_eq!(events[3]["args"]["wr_id"].as_u64(), Some(u64::MAX));
        assert!(events[3]["ts"].as_f64() <= events[6]["ts"].as_f64());
        assert_eq!(text.lines().count(), events.len() + 1);
    }
}
