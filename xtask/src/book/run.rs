//! Runs the commands of the pages, each page on a host of its own.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::blocks::{self, Block, Kind};
use crate::conformance::{Process, Tally};
use crate::dist::Dist;
use crate::workspace::{cargo, root, succeed, target};

/// After this time a page hangs. The longest takes 30 s, and four times as long on a busy machine.
const TIME: Duration = Duration::from_secs(300);

/// Begins the output of a block.
const MARK: &str = "@@ block ";

/// Makes a host with an Ethernet interface, and runs the script there.
const HOST: &str = "\
ip link set lo up
ip link add eth0 type veth peer name eth1
ip address add 192.0.2.1/24 dev eth0
ip link set eth1 up
ip link set eth0 up
ip route add default dev eth0
exec sh -eu \"$0\"
";

/// Takes the place of `sleep` on the pages: their sleeps give a program time to begin, and a busy machine may need longer.
/// So it ends once no other process of this network namespace has wanted a processor in three looks; or after 20 s, for
/// programs that never rest.
const SLEEP: &str = "\
#!/bin/sh
/bin/sleep \"$1\"
looks=0
quiet=0
while [ $quiet -lt 3 ] && [ $looks -lt 400 ]; do
    looks=$((looks + 1))
    quiet=$((quiet + 1))
    for process in /proc/[0-9]*; do
        [ $process/ns/net -ef /proc/self/ns/net ] || continue
        [ $process != /proc/$$ ] || continue
        for thread in $process/task/*/stat; do
            read -r line 2> /dev/null < $thread || continue
            case ${line##*) } in
            R* | D*) quiet=0 ;;
            esac
        done
    done
    /bin/sleep 0.05
done
";

/// The pages of the book and the README, by their names from `root`.
pub(super) fn pages_of(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut pages = vec![PathBuf::from("README.md")];
    super::pages::below(root, Path::new("docs"), "md", &mut pages)?;
    pages.sort();
    Ok(pages)
}

/// Runs every page that has something to run.
pub(super) fn pages(dist: &Dist, filter: Option<&str>) -> anyhow::Result<Tally> {
    let scratch = target().join("book-run");
    let bin = scratch.join("bin");
    fs::create_dir_all(&bin).with_context(|| format!("cannot make {}", bin.display()))?;
    write_program(&bin.join("sleep"), SLEEP)?;
    // The pages' own builds are quick then, and their time is for their programs.
    let mut examples = cargo();
    examples.args(["build", "--quiet", "--workspace"]);
    for program in ["pingpong", "kv", "simulated_rpc", "rpc", "filecopy", "pubsub"] {
        examples.args(["--bin", program]);
    }
    succeed(&mut examples)?;
    let mut tally = Tally::default();
    for page in pages_of(&root())? {
        let name = page.display().to_string();
        if filter.is_some_and(|text| !name.contains(text)) {
            continue;
        }
        let text = fs::read_to_string(root().join(&page))
            .with_context(|| format!("cannot read {name}"))?;
        let blocks = blocks::of(&text);
        if !blocks.iter().any(|block| block.kind == Kind::Run) {
            continue;
        }
        if !has_namespaces() {
            tally.skipped += 1;
            println!("skip {name}: no network namespaces here (`unshare -rn`)");
            continue;
        }
        let started = Instant::now();
        match run(dist, &scratch, &name, &blocks) {
            Ok(count) => {
                tally.passed += 1;
                let seconds = started.elapsed().as_secs_f64();
                println!("ok   {name}: {count} blocks ({seconds:.1} s)");
            }
            Err(error) => {
                tally.failed += 1;
                println!("FAIL {name}: {error:#}");
            }
        }
    }
    Ok(tally)
}

fn unshare() -> Command {
    let mut command = Command::new("unshare");
    // SAFETY: cannot fail and touches no memory.
    let is_root = unsafe { libc::geteuid() } == 0;
    command.arg(if is_root { "-n" } else { "-rn" });
    command
}

fn has_namespaces() -> bool {
    let mut command = unshare();
    command.arg("true").stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn write_program(file: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(file, text)
        .and_then(|()| fs::set_permissions(file, fs::Permissions::from_mode(0o755)))
        .with_context(|| format!("cannot write {}", file.display()))
}

/// Runs the blocks of one page, and compares what they print. Tells how many there were.
fn run(dist: &Dist, scratch: &Path, name: &str, blocks: &[Block]) -> anyhow::Result<usize> {
    let mut script = String::new();
    for block in blocks.iter().filter(|block| block.kind == Kind::Run) {
        script.push_str(&format!("echo '{MARK}{}'\n{}\n", block.line, block.text));
    }
    let file = scratch.join(name.replace('/', "-")).with_extension("sh");
    fs::write(&file, script).with_context(|| format!("cannot write {}", file.display()))?;
    let bin = dist.anyverbs().parent().expect("the command is in a directory").to_owned();
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let first = [scratch.join("bin"), bin].into_iter();
    let path = std::env::join_paths(first.chain(std::env::split_paths(&paths)))
        .context("the directory of the command has a colon in its name")?;
    let mut command = unshare();
    command.args(["sh", "-eu", "-c", HOST]).arg(&file);
    command.current_dir(root()).env("PATH", path).env("CARGO_NET_OFFLINE", "true");
    let mut process = Process::start(&mut command, &file.with_extension("out"))?;
    let status = process.wait(Instant::now() + TIME)?;
    let output = process.output();
    match status {
        Some(status) if status.success() => {}
        Some(status) => bail!("{status} after\n{output}"),
        None => bail!("did not end in {} s after\n{output}", TIME.as_secs()),
    }
    let mut of_last = "";
    let mut count = 0;
    for block in blocks {
        match block.kind {
            Kind::Run => {
                let mark = format!("{MARK}{}\n", block.line);
                let (_, after) = output.split_once(&mark).context("a block was not reached")?;
                of_last = after.split(MARK).next().unwrap_or_default();
                count += 1;
            }
            Kind::Output => blocks::check_output(&block.text, of_last)
                .with_context(|| format!("line {}: the output was\n{of_last}", block.line))?,
            Kind::From(_) | Kind::Unrun => {}
        }
    }
    Ok(count)
}
