//! `cargo xtask fuzz`: the fuzz targets, on libFuzzer.
//!
//! The stable compiler instruments: the flags below are LLVM's own. libFuzzer comes with the crate `libfuzzer-sys`, which a
//! C++ compiler builds.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use anyverbs_testing::corpus;

use crate::conformance::Tally;
use crate::workspace::{cargo, root, succeed};
use crate::{interrupt, packages};

/// Counters of edges that run, a table of where they are, and the operands of comparisons.
const INSTRUMENTED: [&str; 9] = [
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Clink-dead-code",
    "-Cdebug-assertions",
    "-Ccodegen-units=1",
];
/// Given by name, so that code that runs while building (scripts, macros) is not instrumented.
const TRIPLE: &str = env!("XTASK_TARGET");

/// The targets, and the longest input of each.
const TARGETS: [(&str, u32); 14] = [
    ("packet", 512),
    ("responder", 1500),
    ("requester", 1500),
    ("qp_sequence", 1500),
    ("cm", 1500),
    ("receive_path", 600),
    ("shm_ring", 1000),
    ("shm_handshake", 600),
    ("host_store", 1000),
    ("copy_and_crc", 600),
    ("xrc_message", 1000),
    ("rsocket", 1500),
    ("capi", 1000),
    ("config", 600),
];
/// Targets that run at a time. More than two, since a run takes its full time however much it does.
const AT_A_TIME: usize = 4;

/// The greatest size of a target's corpus that the tests replay, without the lengths in its pack.
const KEPT_BYTES: usize = 64 << 10;

/// The targets to fuzz.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// The target to fuzz; without it, all
    #[arg(value_parser = TARGETS.map(|(name, _)| name))]
    target: Option<String>,
    /// Seconds for each target
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Add inputs with more coverage to the corpus that the tests replay, as few as possible
    #[arg(long)]
    keep: bool,
}

impl Options {
    pub(crate) fn all(seconds: u32) -> Self {
        Self { target: None, seconds, keep: false }
    }
}

/// The actions on a corpus.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Corpus {
    /// Write a target's named and packed inputs into a directory, one file each, for `cargo fuzz`
    Unpack(Folder),
    /// Make a target's pack of the files of a directory, without those that are named inputs
    Pack(Folder),
}

/// A target, and the directory of its inputs.
#[derive(Debug, clap::Args)]
pub(crate) struct Folder {
    #[arg(value_parser = TARGETS.map(|(name, _)| name))]
    target: String,
    directory: PathBuf,
}

/// Packs or unpacks a corpus.
pub(crate) fn run_corpus(corpus: &Corpus) -> anyhow::Result<()> {
    match corpus {
        Corpus::Unpack(Folder { target, directory }) => unpack(target, directory),
        Corpus::Pack(Folder { target, directory }) => {
            let named = read(&corpus::named(target))?;
            let inputs = read(directory)?.into_iter().filter(|input| !named.contains(input));
            write(target, inputs.collect())
        }
    }
}

fn unpack(target: &str, directory: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let inputs =
        corpus::inputs(target).with_context(|| format!("cannot read the corpus of {target}"))?;
    for (name, input) in inputs {
        let file = directory.join(name.replace(' ', "-"));
        fs::write(&file, input).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

fn write(target: &str, inputs: Vec<Vec<u8>>) -> anyhow::Result<()> {
    let path = corpus::packed(target);
    fs::write(&path, corpus::pack(inputs))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// The contents of the files of a directory; none if it is not there.
fn read(directory: &Path) -> anyhow::Result<Vec<Vec<u8>>> {
    if !directory.exists() {
        return Ok(Vec::new());
    }
    let read = || fs::read_dir(directory)?.map(|entry| fs::read(entry?.path())).collect();
    let read: std::io::Result<_> = read();
    read.with_context(|| format!("cannot read {}", directory.display()))
}

/// Checks that the targets compile. The ordinary tests replay their corpora.
pub(crate) fn compile() -> anyhow::Result<()> {
    packages::ensure(&[
        packages::CC,
        packages::CXX,
        packages::LIBC6_DEV,
        packages::LIBIBVERBS_DEV,
    ])?;
    let mut check = cargo();
    check.env("CARGO_ENCODED_RUSTFLAGS", "--cfg=fuzzing");
    check.args(["check", "--quiet", "--bins", "--manifest-path"]);
    succeed(check.arg(fuzz().join("Cargo.toml")))
}

/// Builds the targets and runs them; fails if one finds something.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let tally = run_counted(options)?;
    if tally.failed > 0 {
        bail!("{} of the fuzz targets found something", tally.failed);
    }
    Ok(())
}

/// The same, counted.
pub(crate) fn run_counted(options: &Options) -> anyhow::Result<Tally> {
    interrupt::catch();
    packages::ensure(&[
        packages::CC,
        packages::CXX,
        packages::LIBC6_DEV,
        packages::LIBIBVERBS_DEV,
    ])?;
    let built = build()?;
    let chosen = |(name, _): &&(&str, u32)| options.target.as_deref().is_none_or(|t| t == *name);
    let mut waiting: Vec<_> = TARGETS.iter().filter(chosen).collect();
    let mut running: Vec<Target> = Vec::new();
    let mut tally = Tally::default();
    while !waiting.is_empty() || !running.is_empty() {
        interrupt::check()?;
        while running.len() < AT_A_TIME && !waiting.is_empty() {
            let (name, longest) = waiting.remove(0);
            running.push(Target::start(&built, name, *longest, options.seconds)?);
        }
        for mut target in std::mem::take(&mut running) {
            match target.child.try_wait().context("cannot wait for a fuzz target")? {
                None => running.push(target),
                Some(status) if status.success() => {
                    println!("ok   {} {}", target.name, target.summary());
                    if options.keep {
                        target.keep(&built)?;
                    }
                    tally.passed += 1;
                }
                Some(status) => {
                    println!("FAIL {} ({status})\n{}", target.name, target.report());
                    tally.failed += 1;
                }
            }
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(tally)
}

/// The folder of the targets, and the shared object that `capi` runs on.
struct Built {
    bin: PathBuf,
    lib: PathBuf,
}

fn fuzz() -> PathBuf {
    root().join("fuzz")
}

fn build() -> anyhow::Result<Built> {
    let target = fuzz().join("target");
    let instrumented = || {
        let mut command = cargo();
        command
            .env("CARGO_ENCODED_RUSTFLAGS", INSTRUMENTED.join("\u{1f}"))
            .args(["build", "--quiet", "--target", TRIPLE, "--target-dir"])
            .arg(&target);
        command
    };
    // Unwinding, thin LTO and the like are not looked for.
    succeed(instrumented().args(["--profile", "quick", "-p", "anyverbs-capi"]))?;
    let lib = target.join("lib");
    fs::create_dir_all(&lib).with_context(|| format!("cannot make {}", lib.display()))?;
    let object = target.join(TRIPLE).join("quick/libanyverbs_capi.so");
    // The linker uses one name, the loader the other.
    for name in ["libibverbs.so", "libibverbs.so.1"] {
        fs::copy(&object, lib.join(name))
            .with_context(|| format!("cannot copy {}", object.display()))?;
    }
    let mut targets = instrumented();
    targets.env("ANYVERBS_LIB", &lib).args(["--release", "--manifest-path"]);
    succeed(targets.arg(fuzz().join("Cargo.toml")))?;
    Ok(Built { bin: target.join(TRIPLE).join("release"), lib })
}

/// A target that runs.
struct Target {
    name: &'static str,
    child: Child,
    log: PathBuf,
    /// The folder where libFuzzer adds inputs that it found worth keeping; the corpus of the tests is only read.
    corpus: PathBuf,
}

impl Target {
    fn start(
        built: &Built,
        name: &'static str,
        longest: u32,
        seconds: u32,
    ) -> anyhow::Result<Self> {
        let corpus = fuzz().join("target/corpus").join(name);
        let artifacts = fuzz().join("artifacts").join(name);
        for folder in [&corpus, &artifacts] {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        let seeds = kept(name);
        if seeds.exists() {
            fs::remove_dir_all(&seeds)
                .with_context(|| format!("cannot remove {}", seeds.display()))?;
        }
        unpack(name, &seeds)?;
        let log = fuzz().join("target").join(format!("{name}.log"));
        let file =
            fs::File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let child = command(built, name)
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-max_len={longest}"))
            .arg(format!("-artifact_prefix={}/", artifacts.display()))
            .args(["-timeout=20", "-rss_limit_mb=2000", "-print_final_stats=1"])
            .args([&corpus, &seeds])
            .stdin(Stdio::null())
            .stdout(file.try_clone().context("cannot share a file")?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("cannot run the fuzz target {name}"))?;
        Ok(Self { name, child, log, corpus })
    }

    fn output(&self) -> String {
        fs::read(&self.log).map_or_else(
            |error| format!("{}: {error}", self.log.display()),
            |bytes| String::from_utf8_lossy(&bytes).into_owned(),
        )
    }

    /// The amount of work done.
    fn summary(&self) -> String {
        let output = self.output();
        let stat = |name: &str| {
            let line = output.lines().find_map(|line| line.strip_prefix(name));
            line.map_or("?", str::trim).to_owned()
        };
        let covered = output.lines().rev().find_map(|line| {
            let (_, rest) = line.split_once(" cov: ")?;
            rest.split(' ').next()
        });
        format!(
            "{} inputs, {} edges covered, {} MiB",
            stat("stat::number_of_executed_units:"),
            covered.unwrap_or("?"),
            stat("stat::peak_rss_mb:"),
        )
    }

    /// The end of its output: the panic, the input, and where that was saved.
    fn report(&self) -> String {
        let output = self.output();
        let lines: Vec<_> = output.lines().collect();
        lines[lines.len().saturating_sub(60)..].join("\n")
    }

    /// Adds inputs with new coverage to the corpus of the tests. They are chosen greedily, the shortest first, up to a
    /// limit that a repository bears.
    fn keep(&self, built: &Built) -> anyhow::Result<()> {
        let chosen = fuzz().join("target/chosen").join(self.name);
        let _ = fs::remove_dir_all(&chosen);
        fs::create_dir_all(&chosen).context("cannot make a folder")?;
        let mut merge = command(built, self.name);
        merge.args(["-set_cover_merge=1", "-verbosity=0"]);
        succeed(merge.args([&chosen, &kept(self.name), &self.corpus]))?;
        let named = read(&corpus::named(self.name))?;
        let mut kept = corpus::kept(self.name)?;
        let there: Vec<_> = named.into_iter().chain(kept.iter().cloned()).collect();
        let mut left = KEPT_BYTES.saturating_sub(there.iter().map(Vec::len).sum());
        let mut inputs = read(&chosen)?;
        inputs.sort_by_key(Vec::len);
        for input in inputs.into_iter().filter(|input| !there.contains(input)) {
            let Some(rest) = left.checked_sub(input.len()) else { break };
            left = rest;
            kept.push(input);
        }
        write(self.name, kept)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // Neither does anything to a process that has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A folder with a target's corpus, made anew for each run.
fn kept(name: &str) -> PathBuf {
    fuzz().join("target/kept").join(name)
}

fn command(built: &Built, name: &str) -> Command {
    let mut command = Command::new(built.bin.join(name));
    command
        .current_dir(Path::new("/"))
        .env("LD_LIBRARY_PATH", &built.lib)
        // The target `capi` opens a device, which no other process shares.
        .env("ANYVERBS_REGISTRY", "anyverbs-fuzz")
        .env("ANYVERBS_UDP_PORT", "19791")
        .env("ANYVERBS_INTERFACES", "lo")
        .env("ANYVERBS_LOG", "off");
    command
}
