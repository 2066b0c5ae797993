//! `cargo xtask book`: checks the pages of `docs/`, builds the book, runs the programs in its pages and looks at them.

mod blocks;
mod examples;
mod look;
mod pages;
mod programs;
mod run;

pub(crate) use pages::with_absolute_links;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use crate::conformance::Tally;
use crate::dist::{self, Dist};
use crate::workspace::{cargo, root, succeed, target};
use crate::{interrupt, packages};

/// The work beside the checks.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Run the commands of the pages as well, and open each page in a headless browser
    #[arg(long)]
    test: bool,
    /// Run and open only pages with this in their name
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    #[command(flatten)]
    dist: dist::Options,
}

/// The version of mdBook that the book is built with.
const MDBOOK: &str = "0.5.4";

/// Where links lead that leave the book or the tarball.
pub(crate) const REPOSITORY: &str = "https://github.com/anyverbs/anyverbs/blob/main";

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    interrupt::catch();
    let tally = if options.test {
        let dist = dist::run(&options.dist)?;
        run_counted(&dist, options.filter.as_deref())?
    } else {
        checks()
    };
    println!("{tally}");
    if tally.failed > 0 {
        bail!("the book has errors");
    }
    if !options.test {
        println!("{}", build(&mdbook()?)?.join("index.html").display());
    }
    Ok(())
}

/// Checks the pages, runs what they say can be run, and looks at them in a browser.
pub(crate) fn run_counted(dist: &Dist, filter: Option<&str>) -> anyhow::Result<Tally> {
    packages::ensure(&[
        packages::CC,
        packages::LIBC6_DEV,
        packages::LIBIBVERBS_DEV,
        packages::LIBRDMACM_DEV,
        packages::IBVERBS_UTILS,
        packages::PERFTEST,
        packages::PYVERBS,
        packages::IPROUTE2,
        packages::PCIUTILS,
        packages::UCX_UTILS,
        packages::LIBFABRIC_BIN,
        packages::TSHARK,
        packages::JQ,
    ])?;
    let mut tally = checks();
    tally += run::pages(dist, filter)?;
    tally += look::pages(filter)?;
    Ok(tally)
}

/// A check of the pages below a root, which names each fault.
type Check = fn(&Path) -> anyhow::Result<Vec<String>>;

/// Links, the table of contents, excerpts from files, and the examples.
fn checks() -> Tally {
    let mut tally = Tally::default();
    let checks: [(&str, Check); 7] = [
        ("every link leads somewhere", pages::broken_links),
        ("every page is in the table of contents", pages::unlisted),
        ("every excerpt stands in its file", blocks::strange_excerpts),
        ("every command is run, or has a reason", blocks::unrun_without_reason),
        ("every command has a place to write to", blocks::without_place),
        ("every row of programs agrees with its script", programs::strange),
        ("every example is short, and run by a page", examples::faulty),
    ];
    for (name, check) in checks {
        match check(&root()).unwrap_or_else(|error| vec![format!("{error:#}")]) {
            faults if faults.is_empty() => {
                tally.passed += 1;
                println!("ok   {name}");
            }
            faults => {
                tally.failed += 1;
                println!("FAIL {name}\n  {}", faults.join("\n  "));
            }
        }
    }
    tally
}

/// Builds the pages for a browser into `target/book`, and tells where that is.
fn build(mdbook: &Path) -> anyhow::Result<PathBuf> {
    let source = target().join("book-source");
    if source.exists() {
        fs::remove_dir_all(&source).context("cannot remove the last copy of the pages")?;
    }
    copy(&root().join("docs"), &source, Path::new("docs"))?;
    let out = target().join("book");
    if out.exists() {
        fs::remove_dir_all(&out).context("cannot remove the last book")?;
    }
    succeed(Command::new(mdbook).args(["build", "--dest-dir"]).arg(&out).arg(&source))?;
    Ok(out)
}

/// Copies the pages. Links that leave the book lead to the repository.
fn copy(from: &Path, to: &Path, inside: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let path = entry?.path();
        let name = path.file_name().expect("an entry has a name");
        let (copied, place) = (to.join(name), inside.join(name));
        if path.is_dir() {
            copy(&path, &copied, &place)?;
        } else if path.extension().is_some_and(|kind| kind == "md") {
            let text = fs::read_to_string(&path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            fs::write(&copied, pages::with_links_of_the_repository(&text, inside, REPOSITORY))?;
        } else {
            fs::copy(&path, &copied).with_context(|| format!("cannot copy {}", path.display()))?;
        }
    }
    Ok(())
}

/// The builder: one that is installed, or else made from its package.
fn mdbook() -> anyhow::Result<PathBuf> {
    let works = |program: &Path| {
        let mut command = Command::new(program);
        command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    let made = target().join("mdbook");
    let program = made.join("bin/mdbook");
    for installed in [Path::new("mdbook"), &program] {
        if works(installed) {
            return Ok(installed.to_owned());
        }
    }
    println!("building mdBook, some minutes");
    let mut install = cargo();
    install.args(["install", "mdbook", "--version", MDBOOK, "--locked", "--no-default-features"]);
    succeed(install.arg("--root").arg(&made))?;
    Ok(program)
}
