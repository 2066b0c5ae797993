//! Findings of `run --check` as a SARIF document (OASIS SARIF 2.1.0), which services for code scanning read.

use std::env;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use anyverbs_check::Check;
use serde_json::{Value, json};

use crate::finding::{Finding, Frame, Stack};

const SCHEMA: &str = "https://json.schemastore.org/sarif-2.1.0.json";
/// The name that scanning services give the root of the sources.
const ROOT: &str = "%SRCROOT%";

/// A document that `anyverbs run` makes when the program has ended. Until then its processes add lines to a file beside it.
///
/// Launchers that run at the same time may share both. Each keeps a shared lock on the lines, so that the first one empties them
/// and the last one removes them. Each writes the document with all findings that there are when its own program ends.
#[derive(Debug)]
pub(crate) struct Sarif {
    document: PathBuf,
    lines: PathBuf,
    /// Has the lock.
    in_use: File,
}

/// Whether a file of this name is a SARIF document.
pub(crate) fn is_named(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("sarif"))
}

impl Sarif {
    /// Begins the document, if the name of the report asks for one. One that another launcher has begun, and uses, is joined.
    ///
    /// # Errors
    /// The files cannot be written.
    pub(crate) fn begin(report: &Path) -> anyhow::Result<Option<Self>> {
        if !is_named(report) {
            return Ok(None);
        }
        let document = PathBuf::from(crate::args::absolute(report));
        let lines = document.with_extension("sarif.jsonl");
        let failed = || format!("cannot write the report {}", report.display());
        open(&document).with_context(failed)?;
        let in_use = loop {
            if let Some(file) = join(&lines, &document).with_context(failed)? {
                break file;
            }
        };
        Ok(Some(Self { document, lines, in_use }))
    }

    /// The file for lines of JSON.
    pub(crate) fn lines(&self) -> &Path {
        &self.lines
    }

    /// Writes the document. Removes the lines, unless another launcher uses them.
    ///
    /// # Errors
    /// A file cannot be read or written. There is no document then, and the lines stay if there are findings.
    pub(crate) fn end(&self) -> anyhow::Result<()> {
        let failed = || format!("cannot write the report {}", self.document.display());
        // Launchers that end at the same time write it in turn: the last of them reads the findings of all.
        let turn = open(&self.document).with_context(failed)?;
        lock(&turn, libc::LOCK_EX).with_context(failed)?;
        let findings =
            self.read().with_context(|| format!("cannot read {}", self.lines.display()))?;
        let root = env::current_dir().unwrap_or_default();
        let text = format!("{:#}\n", document(&findings, &root));
        let written =
            File::create(&self.document).and_then(|mut file| file.write_all(text.as_bytes()));
        let is_last = lock(&self.in_use, libc::LOCK_EX | libc::LOCK_NB).is_ok();
        if is_last && (written.is_ok() || findings.is_empty()) {
            // The document has them all.
            let _ = fs::remove_file(&self.lines);
        }
        written.with_context(|| {
            // A part of it is no document.
            let _ = fs::remove_file(&self.document);
            let document = self.document.display();
            match findings.len() {
                0 => format!("cannot write the report {document}; there were no findings"),
                _ => format!(
                    "cannot write the report {document}; the findings are in {}",
                    self.lines.display()
                ),
            }
        })
    }

    fn read(&self) -> anyhow::Result<Vec<Finding>> {
        let mut findings = Vec::new();
        for line in BufReader::new(File::open(&self.lines)?).split(b'\n') {
            match serde_json::from_slice(&line?) {
                Ok(finding) => findings.push(finding),
                // A process was killed while it wrote, or the disk was full.
                Err(error) => eprintln!("anyverbs: a line of the report is no finding: {error}"),
            }
        }
        Ok(findings)
    }
}

/// The file of lines with a shared lock. Whoever finds it without one empties it, and the document: nobody takes the findings of an
/// earlier program for those of this one. `None` if another launcher has removed it meanwhile.
fn join(lines: &Path, document: &Path) -> io::Result<Option<File>> {
    let file = open(lines)?;
    match lock(&file, libc::LOCK_EX | libc::LOCK_NB) {
        Ok(()) if is_at(&file, lines) => {
            file.set_len(0)?;
            File::create(document)?;
        }
        Ok(()) => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Err(error) => return Err(error),
    }
    // The launcher that holds it alone begins or ends, and waits for nothing.
    lock(&file, libc::LOCK_SH)?;
    Ok(is_at(&file, lines).then_some(file))
}

/// A file as it is, or a new one.
fn open(path: &Path) -> io::Result<File> {
    File::options().append(true).create(true).open(path)
}

/// Whether this path still means the file.
fn is_at(file: &File, path: &Path) -> bool {
    let of = |it: fs::Metadata| (it.dev(), it.ino());
    let both = file.metadata().and_then(|own| Ok((of(own), of(fs::metadata(path)?))));
    both.is_ok_and(|(own, named)| own == named)
}

/// Changes the lock of a file (flock(2)).
fn lock(file: &File, operation: libc::c_int) -> io::Result<()> {
    loop {
        // SAFETY: a call on a descriptor that is open.
        if unsafe { libc::flock(file.as_raw_fd(), operation) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// The document of some findings of a program that ran in the directory `root`.
fn document(findings: &[Finding], root: &Path) -> Value {
    let rules: Vec<_> = Check::ALL.iter().map(|check| rule(*check)).collect();
    let results: Vec<_> = findings.iter().map(|finding| result(finding, root)).collect();
    let mut uri = file_uri(&root.to_string_lossy());
    if !uri.ends_with('/') {
        uri.push('/');
    }
    json!({
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [{
            "tool": { "driver": {
                "name": "anyverbs check",
                "semanticVersion": env!("CARGO_PKG_VERSION"),
                "informationUri": env!("CARGO_PKG_REPOSITORY"),
                "rules": rules,
            } },
            "originalUriBaseIds": { ROOT: { "uri": uri } },
            "columnKind": "utf16CodeUnits",
            "results": results,
        }],
    })
}

fn rule(check: Check) -> Value {
    json!({
        "id": check.id(),
        "shortDescription": { "text": check.title() },
        "help": { "text": check.page(), "markdown": check.page() },
        "helpUri": format!("{}/blob/main/docs/checks/{check}.md", env!("CARGO_PKG_REPOSITORY")),
    })
}

fn result(finding: &Finding, root: &Path) -> Value {
    let place = Check::ALL.iter().position(|check| check.id() == finding.check);
    // In the stack of the mistake before others.
    let location = finding.stacks.iter().find_map(|stack| first(stack, root));
    let locations = Vec::from_iter(location);
    let stacks: Vec<_> = finding.stacks.iter().map(|stack| stack_of(stack, root)).collect();
    let related: Vec<_> =
        finding.stacks.iter().skip(1).filter_map(|stack| related(stack, root)).collect();
    let mut result = json!({
        "ruleId": finding.check,
        "level": "error",
        "message": { "text": format!("{}. {}", finding.message, finding.remedy) },
        "locations": locations,
        "relatedLocations": related,
        "stacks": stacks,
        "properties": { "process": finding.process },
    });
    if let Some(place) = place {
        result["ruleIndex"] = place.into();
    }
    result
}

fn stack_of(stack: &Stack, root: &Path) -> Value {
    let frames = stack.frames.iter().map(|frame| {
        let mut location =
            location(frame, root).or_else(|| address(frame)).unwrap_or_else(|| json!({}));
        if let Some(function) = &frame.function {
            location["logicalLocations"] =
                json!([{ "fullyQualifiedName": function, "kind": "function" }]);
        }
        let mut framed = json!({ "location": location });
        if let Some(object) = &frame.object {
            framed["module"] = object.as_str().into();
        }
        framed
    });
    json!({ "message": { "text": title(stack) }, "frames": frames.collect::<Vec<_>>() })
}

/// The place of the first frame of a stack that has a file: of the program's own sources, if there is one. Many verbs are inline
/// functions of headers.
fn first(stack: &Stack, root: &Path) -> Option<Value> {
    let is_own =
        |frame: &&Frame| frame.file.as_ref().is_some_and(|file| Path::new(file).starts_with(root));
    let is_header = |frame: &&Frame| {
        let headers = ["infiniband/verbs.h", "rdma/rdma_cma.h", "rdma/rdma_verbs.h"];
        let file = frame.file.as_deref().map(Path::new);
        file.is_some_and(|file| headers.iter().any(|header| file.ends_with(header)))
    };
    let frames = || stack.frames.iter().filter(|frame| frame.file.is_some());
    let frame = frames().find(is_own).or_else(|| frames().find(|frame| !is_header(frame)));
    location(frame.or_else(|| frames().next())?, root)
}

fn related(stack: &Stack, root: &Path) -> Option<Value> {
    let mut location = first(stack, root)?;
    location["message"] = json!({ "text": title(stack) });
    Some(location)
}

fn title(stack: &Stack) -> &str {
    if stack.title.is_empty() { "It happened here" } else { &stack.title }
}

/// The place of a frame in the code of its object, which is what a stripped program has (SARIF 2.1.0, 3.32).
fn address(frame: &Frame) -> Option<Value> {
    let (object, offset) = (frame.object.as_deref()?, frame.offset?);
    let name = Path::new(object).file_name()?.to_string_lossy();
    let place = json!({
        "kind": "instruction",
        "fullyQualifiedName": format!("{name}+{offset:#x}"),
        "relativeAddress": offset,
    });
    Some(json!({
        "physicalLocation": {
            "artifactLocation": { "uri": file_uri(object) },
            "address": place,
        },
    }))
}

/// The place of a frame; `None` if it has no file.
fn location(frame: &Frame, root: &Path) -> Option<Value> {
    let file = frame.file.as_deref()?;
    let artifact = match Path::new(file).strip_prefix(root) {
        Ok(inside) if root.is_absolute() => {
            json!({ "uri": escaped(&inside.to_string_lossy()), "uriBaseId": ROOT })
        }
        _ => json!({ "uri": file_uri(file) }),
    };
    let mut physical = json!({ "artifactLocation": artifact });
    // Line 0 is none.
    if let Some(line) = frame.line.filter(|line| *line > 0) {
        physical["region"] = json!({ "startLine": line });
    }
    Some(json!({ "physicalLocation": physical }))
}

/// An absolute path as a URI, a relative one as a relative reference.
fn file_uri(path: &str) -> String {
    let scheme = if path.starts_with('/') { "file://" } else { "" };
    format!("{scheme}{}", escaped(path))
}

/// A path with `%XX` for bytes that no URI may hold (RFC 3986, 2.1).
fn escaped(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'.' | b'_' | b'~' => {
                out.push(byte.into());
            }
            _ => out += &format!("%{byte:02X}"),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(frames: Value) -> Finding {
        serde_json::from_value(json!({
            "check": "leak",
            "process": 7,
            "message": "the PD was not ended",
            "remedy": "End it.",
            "stacks": [
                { "title": "", "frames": frames },
                { "title": "It was made here", "frames": [{ "function": "g", "file": "/usr/b c.c", "line": 4 }] },
            ],
        }))
        .unwrap()
    }

    #[test]
    fn a_finding_is_a_result_at_its_line_of_the_sources() {
        let frames = json!([
            { "function": "ibv_alloc_pd", "file": null, "line": null },
            { "function": "main", "file": "/home/me/src/a.c", "line": 12 },
        ]);
        let document = document(&[finding(frames)], Path::new("/home/me"));
        let run = &document["runs"][0];
        let result = &run["results"][0];
        let rule = &run["tool"]["driver"]["rules"][result["ruleIndex"].as_u64().unwrap() as usize];
        assert_eq!((&rule["id"], &result["ruleId"]), (&json!("leak"), &json!("leak")));
        assert_eq!(result["locations"].as_array().unwrap().len(), 1);
        let place = &result["locations"][0]["physicalLocation"];
        assert_eq!(place["artifactLocation"], json!({ "uri": "src/a.c", "uriBaseId": ROOT }));
        assert_eq!(place["region"]["startLine"], 12);
        let frame = &result["stacks"][0]["frames"][0]["location"];
        assert_eq!(frame["logicalLocations"][0]["fullyQualifiedName"], "ibv_alloc_pd");
        let made = &result["relatedLocations"][0];
        assert_eq!(made["physicalLocation"]["artifactLocation"]["uri"], "file:///usr/b%20c.c");
        assert_eq!(run["originalUriBaseIds"][ROOT]["uri"], "file:///home/me/");
    }

    /// `ibv_post_send` and others are inline functions of a header, which is not among the program's sources.
    #[test]
    fn a_finding_is_not_placed_in_a_header_of_the_system() {
        let header = json!({ "function": "ibv_post_send", "file": "/usr/include/infiniband/verbs.h", "line": 3342 });
        let cm = json!({ "function": "rdma_post_send", "file": "/usr/include/rdma/rdma_verbs.h", "line": 5 });
        let main = json!({ "function": "main", "file": "/home/me/src/a.c", "line": 12 });
        let library = json!({ "function": "send", "file": "/usr/src/rdma/library.c", "line": 3 });
        let uri = |frames: Value, root: &str| {
            let result = result(&finding(frames), Path::new(root));
            result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].clone()
        };
        for frames in [json!([header, cm, main]), json!([header, library, main])] {
            assert_eq!(uri(frames, "/home/me"), "src/a.c");
        }
        assert_eq!(
            uri(json!([header, cm, library, main]), "/elsewhere"),
            "file:///usr/src/rdma/library.c"
        );
        assert_eq!(uri(json!([header]), "/elsewhere"), "file:///usr/include/infiniband/verbs.h");
    }

    #[test]
    fn a_frame_of_a_stripped_program_has_its_object_and_offset() {
        let frames = json!([
            { "function": "??", "file": null, "line": null, "object": "/usr/bin/a b", "offset": 52 },
        ]);
        let result = result(&finding(frames), Path::new(""));
        let frame = &result["stacks"][0]["frames"][0];
        assert_eq!(frame["module"], "/usr/bin/a b");
        let place = &frame["location"]["physicalLocation"];
        assert_eq!(place["artifactLocation"]["uri"], "file:///usr/bin/a%20b");
        assert_eq!(place["address"]["relativeAddress"], 52);
        assert_eq!(place["address"]["fullyQualifiedName"], "a b+0x34");
        // The second stack has a file.
        assert_eq!(result["locations"].as_array().unwrap().len(), 1);
    }

    #[test]
    fn a_finding_without_files_has_no_location() {
        let frames = json!([{ "function": "main", "file": null, "line": null }]);
        let result = result(&finding(frames.clone()), Path::new(""));
        // The second stack has one.
        assert_eq!(result["locations"].as_array().unwrap().len(), 1);
        let mut bare = finding(frames);
        bare.stacks.truncate(1);
        bare.check = "of a later version".into();
        let result = super::result(&bare, Path::new("/"));
        assert_eq!(result["locations"], json!([]));
        assert!(result.get("ruleIndex").is_none());
    }
}
