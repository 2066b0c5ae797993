//! The project's own commands.

mod abi_check;
mod bench;
mod book;
mod browser;
mod conformance;
mod demo;
mod deny;
mod dist;
mod fuzz;
mod interrupt;
mod mutants;
mod package;
mod packages;
mod page;
mod record;
mod report;
mod sanitize;
mod soak;
mod test;
mod workspace;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The project's own commands.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Build the shipped files and lay them out in target/dist
    Dist(dist::Options),
    /// Make the packages that users install, in target/package
    Package(package::Options),
    /// Show Debian's own RDMA tools running on the device
    Demo(dist::Options),
    /// Make the pictures of the README and the book anew, from runs on this machine
    Record(dist::Options),
    /// Open the page of `anyverbs report` in a headless browser
    Report(dist::Options),
    /// Run every test
    Test(test::Options),
    /// Run other people's suites and tools on the device
    Conformance(conformance::Options),
    /// Run the fuzz targets
    Fuzz(fuzz::Options),
    /// Pack or unpack the corpus of a fuzz target
    #[command(subcommand)]
    Corpus(fuzz::Corpus),
    /// Check licences, sources and versions of the project's dependencies
    Deny,
    /// Run tests below sanitizers
    Sanitize,
    /// Put defects into the code, and see whether tests notice
    Mutants(mutants::Options),
    /// Do everything for long, and watch the memory
    Soak(soak::Options),
    /// Measure the device beside TCP and bare UDP, and its cost to a process
    Bench(bench::Options),
    /// Check the pages in docs/ and build the book; with --test, run the programs in them and look at each page
    Book(book::Options),
    /// Compare the built shared object with the symbol and layout tables of rdma-core
    AbiCheck {
        /// The shared object; without it, target/dist is built and checked
        object: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    let done = match Args::parse().command {
        Command::Dist(options) => dist::run(&options).map(|_| ()),
        Command::Package(options) => package::run(&options),
        Command::Demo(options) => demo::run(&options),
        Command::Record(options) => record::run(&options),
        Command::Report(options) => report::run(&options),
        Command::Test(options) => test::run(&options),
        Command::Conformance(options) => conformance::run(&options),
        Command::Fuzz(options) => fuzz::run(&options),
        Command::Corpus(corpus) => fuzz::run_corpus(&corpus),
        Command::Deny => deny::run(),
        Command::Sanitize => sanitize::run(),
        Command::Mutants(options) => mutants::run(&options),
        Command::Soak(options) => soak::run(&options),
        Command::Bench(options) => bench::run(&options),
        Command::Book(options) => book::run(&options),
        Command::AbiCheck { object } => abi_check(object),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn abi_check(object: Option<PathBuf>) -> anyhow::Result<()> {
    match object {
        Some(object) => abi_check::run(&workspace::root(), &object),
        None => abi_check::run_all(&workspace::root(), &dist::run(&dist::Options::default())?),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Args::command().debug_assert();
    }
}
