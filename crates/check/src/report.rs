//! Reports: their words, where they go, and which are wanted.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, c_int, c_void};
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process;
use std::ptr;
use std::sync::{Condvar, Mutex, PoisonError};

use anyverbs_environment as environment;
use serde_json::{Value, json};

use crate::catalogue::Check;
use crate::stack::Stack;
use crate::uncancelled::Uncancelled;

/// The exit status of a program with findings that would end with 0.
pub(crate) const STATUS: i32 = 66;

/// Headings of a page that a report repeats.
pub(crate) const WHY: &str = "Why it matters on hardware";
pub(crate) const REMEDY: &str = "What to do";

/// A mistake, with the places that belong to it.
#[derive(Debug)]
pub(crate) struct Finding {
    pub(crate) check: Check,
    /// Tells it apart from others of the same place.
    pub(crate) about: String,
    /// One sentence, without its full stop.
    pub(crate) what: String,
    /// Where it went wrong, then where things came from, each with a heading.
    pub(crate) stacks: Vec<(String, Stack)>,
}

/// Where reports go.
#[derive(Debug)]
pub(crate) struct Reporter {
    pub(crate) is_fatal: bool,
    /// A file with a JSON object a line. It is opened for each: programs close descriptors that they do not know.
    file: Option<PathBuf>,
    /// The id of a check (empty for any), and a part of a function's name or of a path.
    suppressions: Vec<(String, String)>,
    /// The place among the mistakes of a check, its subject, and the innermost frames of its stacks.
    seen: HashMap<(Check, String, Places), usize>,
    /// The mistakes that were reported, in the order of their first reports.
    mistakes: Vec<Mistake>,
    /// Whether a finding of these stacks is suppressed. The names of functions take long to find.
    suppressed: HashMap<(Check, Vec<Stack>), bool>,
    pub(crate) findings: u32,
}

/// A mistake of one place.
#[derive(Debug)]
struct Mistake {
    check: Check,
    /// The sentence of its first report.
    what: String,
    /// How often it was made.
    count: usize,
}

/// The objects that are left at the end.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Left {
    /// How many there are of each kind, by its name.
    pub(crate) kinds: BTreeMap<&'static str, usize>,
    /// How many of them have a report.
    pub(crate) reported: usize,
}

/// The innermost frames of some stacks.
type Places = Vec<Box<[usize]>>;

/// Most reports of one check with the same innermost frames. A program may make a mistake for each message.
const MOST_ALIKE: usize = 3;
/// Most mistakes of the summary.
const MOST_LISTED: usize = 20;
/// Frames of a stack that are looked at for that. Above them a library's callers differ.
const INNERMOST: usize = 3;

impl Reporter {
    /// As the variables say; `None` if they do not ask for checks.
    pub(crate) fn from_environment() -> Option<Self> {
        let mode =
            environment::variable("ANYVERBS_CHECK").filter(|mode| mode != OsStr::new("0"))?;
        let file = environment::variable("ANYVERBS_CHECK_REPORT").and_then(|path| {
            // The program may change its directory.
            let path = std::path::absolute(&path).unwrap_or(PathBuf::from(path));
            let opened = open(&path);
            opened
                .inspect_err(|e| say(&format!("anyverbs check: {}: {e}\n", path.display())))
                .ok()?;
            Some(path)
        });
        // As `anyverbs run` does, which ends before the program begins. Here the program runs on, and all its findings are shown.
        let suppressions = environment::variable("ANYVERBS_CHECK_SUPPRESSIONS").and_then(|path| {
            let read = fs::read_to_string(&path).map_err(|e| e.to_string());
            let read = read.and_then(|text| check_suppressions(&text).map(|()| text));
            let refused = |why: &String| {
                say(&format!(
                    "anyverbs check: no finding is left out, since the suppressions {} cannot be used: {why}\n",
                    path.display()
                ));
            };
            read.inspect_err(refused).ok()
        });
        if !["1", "report", "fatal"].iter().any(|known| mode == OsStr::new(known)) {
            say(&format!(
                "anyverbs check: ANYVERBS_CHECK is {mode:?}, and may be report, fatal or 0; mistakes are reported\n"
            ));
        }
        let reporter = Self::new(&suppressions.unwrap_or_default(), file);
        Some(Self { is_fatal: mode == OsStr::new("fatal"), ..reporter })
    }

    /// It reports to standard error and to this file.
    pub(crate) fn new(suppressions: &str, file: Option<PathBuf>) -> Self {
        Self {
            is_fatal: false,
            file,
            suppressions: parse(suppressions),
            seen: HashMap::new(),
            mistakes: Vec::new(),
            suppressed: HashMap::new(),
            findings: 0,
        }
    }

    /// One with the same orders that has reported nothing.
    pub(crate) fn anew(&mut self) -> Self {
        let suppressions = std::mem::take(&mut self.suppressions);
        Self { is_fatal: self.is_fatal, suppressions, ..Self::new("", self.file.take()) }
    }

    /// Reports it, unless it is suppressed or enough others are alike. Returns whether it did.
    pub(crate) fn report(&mut self, finding: &Finding) -> bool {
        self.give(finding, true)
    }

    /// As [`report`](Self::report), to the file alone.
    pub(crate) fn report_to_file(&mut self, finding: &Finding) -> bool {
        self.give(finding, false)
    }

    fn give(&mut self, finding: &Finding, is_said: bool) -> bool {
        // Otherwise it would be counted among those that are alike, and hide another one.
        if self.is_suppressed(finding) {
            return false;
        }
        let stacks =
            finding.stacks.iter().map(|(_, stack)| stack.innermost(INNERMOST).into()).collect();
        let (check, next) = (finding.check, self.mistakes.len());
        let place = *self.seen.entry((check, finding.about.clone(), stacks)).or_insert(next);
        if place == next {
            self.mistakes.push(Mistake { check, what: finding.what.clone(), count: 0 });
        }
        let alike = &mut self.mistakes[place].count;
        *alike += 1;
        let alike = *alike;
        if alike > MOST_ALIKE {
            return false;
        }
        // The ledger is locked.
        let _uncancelled = Uncancelled::new();
        let shown = Shown::new(finding);
        self.findings += 1;
        if is_said {
            say(&shown.text());
        }
        if is_said && alike == MOST_ALIKE {
            say(&format!("anyverbs check: further reports of {check} here are left out\n"));
        }
        let line = format!("{}\n", shown.json());
        let written = self.file.as_ref().map(|path| open(path)?.write_all(line.as_bytes()));
        if let Some(Err(error)) = written {
            // Once: a part of a line may stand there, so no line can follow it.
            say(&format!("anyverbs check: the report ends here: {error}\n"));
            self.file = None;
        }
        if self.is_fatal {
            write_streams();
            // SAFETY: ends the process.
            unsafe { libc::_exit(STATUS) };
        }
        true
    }

    /// All that was found, when a program ends with this status: mistakes first, whatever was reported after them. `None` if nothing was.
    pub(crate) fn summary(&self, left: &Left, status: i32) -> Option<String> {
        let mistakes: Vec<_> = self.mistakes.iter().filter(|m| m.check != Check::Leak).collect();
        if mistakes.is_empty() && left.kinds.is_empty() {
            return None;
        }
        let mut text = format!("\n=={}== anyverbs check: summary\n", process::id());
        for Mistake { check, what, count } in mistakes.iter().take(MOST_LISTED) {
            // Writing to a String cannot fail.
            let _ = match count - 1 {
                0 => writeln!(text, "  {check}: {what}"),
                more => writeln!(text, "  {check}: {what}; and {more} more of the same"),
            };
        }
        if let Some(more @ 1..) = mistakes.len().checked_sub(MOST_LISTED) {
            let are = if more == 1 { "mistake is" } else { "mistakes are" };
            let _ = writeln!(text, "  {more} other {are} reported above");
        }
        if left.kinds.is_empty() {
            return Some(text);
        }
        let (all, check) = (left.kinds.values().sum::<usize>(), Check::Leak);
        let kinds: Vec<_> = left.kinds.iter().map(|(kind, n)| format!("{kind} ({n})")).collect();
        let were = if all == 1 { "object was" } else { "objects were" };
        let _ = writeln!(text, "  {check}: {all} {were} not ended: {}", kinds.join(", "));
        if status != 0 && !self.is_fatal {
            let _ = writeln!(
                text,
                "    The program failed (status {status}), so these have no reports here. A file of --check-report has them."
            );
        } else if left.reported < all {
            let are = if left.reported == 1 { "is" } else { "are" };
            let _ = writeln!(text, "    {} of them {are} reported above.", left.reported);
        }
        Some(text)
    }

    pub(crate) fn is_suppressed(&mut self, finding: &Finding) -> bool {
        if self.suppressions.is_empty() {
            return false;
        }
        let stacks = finding.stacks.iter().map(|(_, stack)| *stack).collect();
        let known = self.suppressed.entry((finding.check, stacks));
        *known.or_insert_with(|| Shown::new(finding).is_suppressed(&self.suppressions))
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).open(path)
}

unsafe extern "C" {
    static stdout: *mut libc::FILE;
    static stderr: *mut libc::FILE;
    fn ftrylockfile(stream: *mut libc::FILE) -> c_int;
    fn fflush_unlocked(stream: *mut libc::FILE) -> c_int;
    fn funlockfile(stream: *mut libc::FILE);
}

/// Writes what the program's streams hold. A thread that waits in a read has the lock of its stream, perhaps for good.
fn write_streams() {
    // As long as their readers need.
    // SAFETY: streams of the C library, and one that is locked here is released here.
    unsafe {
        for stream in [stdout, stderr] {
            if ftrylockfile(stream) == 0 {
                fflush_unlocked(stream);
                funlockfile(stream);
            }
        }
    }
    // The standard library's threads and channels would wait for the loader, and the ledger is locked.
    let mut thread: libc::pthread_t = 0;
    // SAFETY: the function uses no argument.
    let failed = crate::without_signals(|| unsafe {
        libc::pthread_create(&raw mut thread, ptr::null(), write_all_streams, ptr::null_mut())
    });
    if failed == 0 {
        let are_written = ARE_WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = WRITTEN.wait_timeout_while(are_written, crate::LATE, |are_written| !*are_written);
    }
}

static ARE_WRITTEN: Mutex<bool> = Mutex::new(false);
static WRITTEN: Condvar = Condvar::new();

extern "C" fn write_all_streams(_: *mut c_void) -> *mut c_void {
    // SAFETY: NULL means all streams.
    unsafe { libc::fflush(ptr::null_mut()) };
    *ARE_WRITTEN.lock().unwrap_or_else(PoisonError::into_inner) = true;
    WRITTEN.notify_one();
    ptr::null_mut()
}

/// Writes to standard error. A closed one is ignored.
pub(crate) fn say(text: &str) {
    let _uncancelled = Uncancelled::new();
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// The name of the program's file.
fn program() -> Option<String> {
    let path = std::env::current_exe().ok()?;
    Some(path.file_name()?.to_string_lossy().into_owned())
}

/// The rules of a file of suppressions without their comments, each with the number of its line.
fn rules(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim())
        .enumerate()
        .filter(|(_, line)| !line.is_empty())
        .map(|(n, line)| (n + 1, line))
}

/// Why a file of suppressions is not as it should be: its first line that is no rule.
///
/// # Errors
/// A check that does not exist, or a line without a part.
pub fn check_suppressions(text: &str) -> Result<(), String> {
    for (n, line) in rules(text) {
        let wrong = |what: &str| Err(format!("line {n}: {what}: {line:?}"));
        let Some((check, part)) = line.split_once(':') else {
            return wrong("a rule is CHECK:PART, and this has no colon");
        };
        let check = check.trim();
        if part.trim().is_empty() {
            return wrong("there is no part of a function's name or of a path behind the colon");
        }
        if !check.is_empty() && Check::ALL.iter().all(|known| known.id() != check) {
            return wrong("there is no such check (`anyverbs explain` lists them)");
        }
    }
    Ok(())
}

/// The rules of a file of suppressions that was [checked](check_suppressions): `CHECK:PART`, and comments after `#`.
fn parse(text: &str) -> Vec<(String, String)> {
    rules(text)
        .filter_map(|(_, line)| {
            let (check, part) = line.split_once(':')?;
            Some((check.trim().to_owned(), part.trim().to_owned()))
        })
        .collect()
}

/// A finding whose stacks have names.
struct Shown<'a> {
    finding: &'a Finding,
    stacks: Vec<(&'a str, Vec<crate::stack::Frame>)>,
}

impl<'a> Shown<'a> {
    fn new(finding: &'a Finding) -> Self {
        let named = |(title, stack): &'a (String, Stack)| (title.as_str(), stack.frames());
        Self { finding, stacks: finding.stacks.iter().map(named).collect() }
    }

    fn is_suppressed(&self, rules: &[(String, String)]) -> bool {
        let frames = || self.stacks.iter().flat_map(|(_, frames)| frames);
        rules.iter().any(|(check, part)| {
            let is_here = |text: &str| text.contains(part.as_str());
            (check.is_empty() || check == self.finding.check.id())
                && frames().any(|frame| {
                    is_here(&frame.function)
                        || frame.place.as_ref().is_some_and(|(file, _)| is_here(file))
                        || frame.object.as_ref().is_some_and(|(path, _)| is_here(path))
                })
        })
    }

    fn text(&self) -> String {
        let Finding { check, what, .. } = self.finding;
        let rule = "=".repeat(72);
        // The last line of the program may lack its end.
        let mut text = format!("\n{rule}\n=={}== anyverbs check: {check}: {what}\n", process::id());
        for (title, frames) in &self.stacks {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{}{title}:", if title.is_empty() { "" } else { "  " });
            for (n, frame) in frames.iter().enumerate() {
                let _ = writeln!(text, "    #{n} {frame}");
            }
        }
        let _ = writeln!(text, "  {WHY}: {}", check.section(WHY));
        let _ = writeln!(text, "  {REMEDY}: {}", check.section(REMEDY));
        let _ = writeln!(text, "  More: anyverbs explain {check}\n{rule}");
        text
    }

    fn json(&self) -> Value {
        let Finding { check, what, .. } = self.finding;
        let stacks = self.stacks.iter().map(|(title, frames)| {
            let frames = frames.iter().map(|frame| {
                let (file, line) = frame.place.clone().unzip();
                let (object, offset) = frame.object.clone().unzip();
                json!({
                    "function": frame.function,
                    "file": file,
                    "line": line,
                    "object": object,
                    "offset": offset,
                })
            });
            json!({ "title": title, "frames": frames.collect::<Vec<_>>() })
        });
        json!({
            "check": check.id(),
            "process": process::id(),
            "program": program(),
            "message": what,
            "stacks": stacks.collect::<Vec<_>>(),
            "why": check.section(WHY),
            "remedy": check.section(REMEDY),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding() -> Finding {
        let stacks = vec![("It was made here".to_owned(), Stack::here())];
        let (about, what) = (String::new(), "something was not ended".into());
        Finding { check: Check::Leak, about, what, stacks }
    }

    #[test]
    fn a_suppression_names_a_check_and_part_of_a_frame() {
        let finding = finding();
        let shown = Shown::new(&finding);
        let is_suppressed = |text| shown.is_suppressed(&parse(text));
        assert!(is_suppressed("leak:a_suppression_names"));
        assert!(is_suppressed("# comment\n\n:report.rs # any check"));
        assert!(!is_suppressed("buffer-changed:a_suppression_names"));
        assert!(!is_suppressed("leak:nowhere"));
        assert!(!is_suppressed(""));
    }

    #[test]
    fn a_line_that_is_no_rule_is_named() {
        assert_eq!(check_suppressions("# why\n\nleak:main # known\n:file.c\n"), Ok(()));
        for (text, why) in [
            ("leak:main\nlaek:main", "line 2: there is no such check"),
            ("leak", "line 1: a rule is CHECK:PART"),
            ("\nleak: # all", "line 2: there is no part"),
        ] {
            let said = check_suppressions(text).unwrap_err();
            assert!(said.starts_with(why), "{said}");
        }
    }

    #[test]
    fn a_report_that_cannot_be_written_ends() {
        let file = Some(PathBuf::from("/dev/full"));
        let mut reporter = Reporter::new("", file);
        reporter.report(&finding());
        assert!(reporter.file.is_none() && reporter.findings == 1);
    }

    #[test]
    fn a_mistake_of_one_place_is_reported_a_few_times() {
        let mut reporter = Reporter::new("", None);
        let alike = finding();
        let shown = (0..100).filter(|_| reporter.report(&alike)).count();
        assert_eq!((shown, reporter.findings as usize), (MOST_ALIKE, MOST_ALIKE));
        reporter.report(&Finding { check: Check::CqOverrun, ..finding() });
        assert_eq!(reporter.findings as usize, MOST_ALIKE + 1);
    }

    #[test]
    fn the_summary_lists_mistakes_once_with_their_number_and_then_what_is_left() {
        let mut reporter = Reporter::new("", None);
        assert_eq!(reporter.summary(&Left::default(), 1), None);
        let overrun = Finding { check: Check::CqOverrun, what: "it is full".into(), ..finding() };
        assert_eq!((0..13).filter(|_| reporter.report(&overrun)).count(), MOST_ALIKE);
        reporter.report(&finding());
        let left =
            Left { kinds: BTreeMap::from([("memory region", 2), ("queue pair", 1)]), reported: 1 };
        let lines = |status| {
            let text = reporter.summary(&left, status).unwrap();
            text.lines().skip(2).map(|line| line.trim_start().to_owned()).collect::<Vec<_>>()
        };
        let found = [
            "cq-overrun: it is full; and 12 more of the same",
            "leak: 3 objects were not ended: memory region (2), queue pair (1)",
        ];
        assert_eq!(lines(0), [found[0], found[1], "1 of them is reported above."]);
        let failed = "The program failed (status 7), so these have no reports here. A file of --check-report has them.";
        assert_eq!(lines(7), [found[0], found[1], failed]);
    }

    #[test]
    fn a_report_says_what_where_why_and_what_to_do() {
        let finding = finding();
        let shown = Shown::new(&finding);
        let text = shown.text();
        for part in ["leak: something was not ended", "It was made here:", "#0 ", WHY, REMEDY] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let json = shown.json();
        assert_eq!(json["check"], "leak");
        assert!(json["program"].as_str().unwrap().starts_with("anyverbs_check"));
        assert!(!json["stacks"][0]["frames"].as_array().unwrap().is_empty());
    }
}
