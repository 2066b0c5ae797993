//! `process_vm_writev` and `process_vm_readv`: one system call a message, into or out of a process that sleeps.

use std::env;
use std::io::{self, BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::ValueEnum;

use crate::processor::median;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Direction {
    Write,
    Read,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Figure {
    /// Microseconds of a call, the median
    Latency,
    /// Gb/s
    Bandwidth,
}

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    direction: Direction,
    figure: Figure,
    /// Bytes of a message
    #[arg(long, default_value_t = 65536)]
    size: usize,
    /// Duration
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let mut target = Command::new(env::current_exe().context("cannot find this program")?)
        .args(["copy-target", &options.size.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start the other process")?;
    let mut line = String::new();
    let output = target.stdout.take().context("the other process has no output")?;
    BufReader::new(output).read_line(&mut line).context("the other process is silent")?;
    let address = line.trim().parse().context("the other process gave no address")?;
    let result = measure(options, target.id(), address);
    // It ends when its standard input does.
    drop(target.stdin.take());
    target.wait().context("the other process does not end")?;
    println!("{:.3}", result?);
    Ok(())
}

fn measure(options: &Options, process: u32, address: usize) -> anyhow::Result<f64> {
    let mut buffer = vec![7u8; options.size];
    let local = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let remote = libc::iovec { iov_base: address as *mut _, iov_len: buffer.len() };
    let call = match options.direction {
        Direction::Write => libc::process_vm_writev,
        Direction::Read => libc::process_vm_readv,
    };
    let process = process.cast_signed();
    let transfer = || -> anyhow::Result<()> {
        // SAFETY: the local vector is this function's buffer; the other process uses its own for nothing else.
        let n = unsafe { call(process, &raw const local, 1, &raw const remote, 1, 0) };
        match usize::try_from(n) {
            Ok(n) if n == options.size => Ok(()),
            Ok(n) => bail!("{n} bytes in place of {}", options.size),
            Err(_) => Err(io::Error::last_os_error()).context("cannot copy"),
        }
    };
    let end = Duration::from_secs_f64(options.seconds);
    for _ in 0..16 {
        transfer()?;
    }
    let begin = Instant::now();
    let mut times = Vec::new();
    let mut count = 0u64;
    match options.figure {
        Figure::Latency => {
            while begin.elapsed() < end {
                let start = Instant::now();
                transfer()?;
                times.push(start.elapsed().as_secs_f64() * 1e6);
            }
            median(&mut times)
        }
        Figure::Bandwidth => {
            while begin.elapsed() < end {
                for _ in 0..16 {
                    transfer()?;
                }
                count += 16;
            }
            let bits = count as f64 * options.size as f64 * 8.0;
            Ok(bits / begin.elapsed().as_secs_f64() / 1e9)
        }
    }
}

/// Prints where its buffer is and sleeps until its standard input ends.
pub(crate) fn target(size: usize) -> anyhow::Result<()> {
    // Written, so that every page is there.
    let buffer = vec![1u8; size];
    println!("{}", buffer.as_ptr().expose_provenance());
    io::stdin().read_to_end(&mut Vec::new()).context("cannot wait")?;
    Ok(())
}
