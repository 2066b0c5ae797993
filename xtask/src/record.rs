//! `cargo xtask record`: the pictures in the README and the book, from runs on this machine: recordings of a terminal, and a report.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::conformance::quiet;
use crate::dist;
use crate::workspace::root;
use crate::{interrupt, packages, report};

/// A recording.
struct Picture {
    /// Its place, from the root of the repository.
    path: &'static str,
    title: &'static str,
    /// The typed lines, and the words of which each shown line has one.
    typed: &'static [(&'static str, &'static [&'static str])],
}

const PICTURES: [Picture; 2] = [
    Picture {
        path: "docs/images/first-run.svg",
        title: "A terminal: programs of rdma-core and perftest run on anyverbs",
        typed: &[
            (
                "anyverbs run -- ibv_devinfo",
                &["hca_id", "transport:", "fw_ver", "port:", "state:", "max_mtu", "link_layer"],
            ),
            (
                "anyverbs run -- ib_write_bw >/dev/null & sleep 1\nanyverbs run -- ib_write_bw 127.0.0.1",
                &[
                    "RDMA_Write BW Test",
                    "Dual-port",
                    "Connection type",
                    "Link type",
                    "#bytes",
                    "65536",
                ],
            ),
            (
                "anyverbs doctor -- /usr/bin/ib_write_bw",
                &["GID 0", "port", "/usr/bin/ib_write_bw is", "ready"],
            ),
        ],
    },
    Picture {
        path: "docs/images/top.svg",
        title: "A terminal: anyverbs top shows two programs of perftest and their queue pairs",
        typed: &[(
            "anyverbs run -- ib_send_bw -D 4 >/dev/null & sleep 1\n\
             anyverbs run -- ib_send_bw -D 4 127.0.0.1 >/dev/null & sleep 2\n\
             anyverbs top --once",
            EVERYTHING,
        )],
    },
];

/// Each line has this.
const EVERYTHING: &[&str] = &[""];

/// A line of the terminal, and when it appeared.
struct Line {
    at: Duration,
    text: String,
    is_typed: bool,
}

/// Runs the commands of each picture on a host of their own and draws what was seen.
pub(crate) fn run(options: &dist::Options) -> anyhow::Result<()> {
    interrupt::catch();
    packages::ensure(&[packages::IBVERBS_UTILS, packages::PERFTEST, packages::IPROUTE2])?;
    let dist = dist::run(options)?;
    let bin = dist.anyverbs().parent().expect("the command is in a directory").to_owned();
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(std::iter::once(bin).chain(std::env::split_paths(&paths)))
        .context("the directory of the command has a colon in its name")?;
    for picture in &PICTURES {
        let lines = record(picture, &path)?;
        let to = root().join(picture.path);
        fs::create_dir_all(to.parent().expect("it is in a directory"))?;
        fs::write(&to, draw(picture.title, &lines))
            .with_context(|| format!("cannot write {}", picture.path))?;
        println!("{}, {} lines", picture.path, lines.len());
    }
    report::picture(&dist)
}

/// Runs the commands of a picture, with this search path.
fn record(picture: &Picture, path: &OsStr) -> anyhow::Result<Vec<Line>> {
    let host = "ip link set lo up\n\
                ip link add eth0 type veth peer name eth1\n\
                ip address add 192.0.2.1/24 dev eth0\n\
                ip link set eth1 up\n\
                ip link set eth0 up\n";
    let started = Instant::now();
    let mut lines = Vec::new();
    for &(typed, words) in picture.typed {
        for line in typed.lines() {
            lines.push(Line { at: started.elapsed(), text: format!("$ {line}"), is_typed: true });
        }
        let mut command = Command::new("unshare");
        // SAFETY: cannot fail and touches no memory.
        let is_root = unsafe { libc::geteuid() } == 0;
        command.arg(if is_root { "-n" } else { "-rn" });
        command.args(["sh", "-eu", "-c", &format!("{host}{typed}\nwait")]);
        let output = quiet(command.env("PATH", path).stdin(Stdio::null()))?;
        let before = lines.len();
        for line in output.lines().filter(|line| words.iter().any(|word| line.contains(word))) {
            let text = without_tabs(line).trim_end().to_owned();
            lines.push(Line { at: started.elapsed(), text, is_typed: false });
        }
        if lines.len() == before {
            bail!("`{typed}` printed none of {words:?}:\n{output}");
        }
    }
    Ok(lines)
}

/// A line with spaces up to each tab stop, as a terminal shows it.
fn without_tabs(line: &str) -> String {
    let mut text = String::new();
    for c in line.chars() {
        match c {
            '\t' => text.push_str(&" ".repeat(8 - text.chars().count() % 8)),
            c => text.push(c),
        }
    }
    text
}

const WIDTH: usize = 96;
const CHARACTER: f64 = 8.0;
const HEIGHT: usize = 18;
const MARGIN: usize = 14;

/// An SVG. Each line appears at its time. Where animations are not shown, all lines are there.
fn draw(title: &str, lines: &[Line]) -> String {
    let width = (WIDTH as f64 * CHARACTER) as usize + 2 * MARGIN;
    let height = lines.len() * HEIGHT + 2 * MARGIN;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\">\n\
         <title>{title}</title>\n\
         <style>\n\
         text {{ font: 13.3px ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: #d0d7de; white-space: pre; }}\n\
         .typed {{ fill: #7ee787; }}\n\
         @keyframes hidden {{ from, to {{ opacity: 0; }} }}\n\
         </style>\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#0d1117\"/>\n",
    );
    for (number, line) in lines.iter().enumerate() {
        let text: String = line.text.chars().take(WIDTH).collect();
        let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        let y = MARGIN + HEIGHT * number + 13;
        let class = if line.is_typed { " class=\"typed\"" } else { "" };
        // Writing to a String cannot fail.
        let _ = writeln!(
            svg,
            "<text x=\"{MARGIN}\" y=\"{y}\"{class} xml:space=\"preserve\" style=\"animation: hidden {:.1}s step-end\">{text}</text>",
            line.at.as_secs_f64(),
        );
    }
    svg.push_str("</svg>\n");
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tabs_lead_to_the_next_stop() {
        assert_eq!(without_tabs("\ta\tbcdefgh\ti"), "        a       bcdefgh i");
    }

    #[test]
    fn lines_are_drawn_in_order_and_escaped() {
        let line = |at, text: &str| Line {
            at: Duration::from_millis(at),
            text: text.into(),
            is_typed: text.starts_with('$'),
        };
        let svg = draw("a title", &[line(0, "$ a <b> & c"), line(1500, "done")]);
        assert!(svg.contains("class=\"typed\"") && svg.contains("$ a &lt;b&gt; &amp; c"), "{svg}");
        assert!(svg.contains("hidden 1.5s step-end\">done"), "{svg}");
    }
}
