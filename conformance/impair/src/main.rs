//! The program: see the library.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::bail;
use anyverbs_impair::interface::Interface;
use anyverbs_impair::path::{Counts, Faults, Path};
use clap::Parser;

/// Passes frames between two interfaces, with the faults of a bad network. Ends with SIGTERM, and reports its counts.
#[derive(Debug, Parser)]
#[command(name = "anyverbs-impair")]
struct Args {
    /// One interface
    one: String,
    /// The other
    other: String,
    #[command(flatten)]
    faults: Faults,
    /// During the outage the carrier is gone, too
    #[arg(long)]
    carrier: bool,
    /// The UDP port of RoCE packets
    #[arg(long, default_value_t = 4791)]
    port: u16,
    /// The longest frame; longer ones are batches, and reported
    #[arg(long, default_value_t = 1514)]
    longest: usize,
    /// Begins the sequence of random choices
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

static ENDS: AtomicBool = AtomicBool::new(false);

extern "C" fn end(_signal: libc::c_int) {
    ENDS.store(true, Ordering::Relaxed);
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let handler: extern "C" fn(libc::c_int) = end;
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler stores to an atomic, which is async-signal-safe.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
    // SAFETY: touches no memory. Whoever started it and was killed does not stop it any more.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) };
    let interfaces = [Interface::open(&args.one)?, Interface::open(&args.other)?];
    // From the first to the second, and back.
    let mut paths = [0, 1].map(|direction| {
        Path::new(args.faults.clone(), args.port, args.longest, args.seed * 2 + direction)
    });
    println!("ready");
    let counts = bridge(&args, &interfaces, &mut paths)?;
    println!("{counts}");
    Ok(())
}

fn bridge(
    args: &Args,
    interfaces: &[Interface; 2],
    paths: &mut [Path; 2],
) -> anyhow::Result<Counts> {
    let begin = Instant::now();
    let mut buffer = vec![0; 1 << 17];
    let mut is_up = true;
    let mut refused = 0;
    while !ENDS.load(Ordering::Relaxed) {
        wait(interfaces, paths.iter().filter_map(Path::next).min(), begin.elapsed())?;
        for (interface, path) in interfaces.iter().zip(paths.iter_mut()) {
            // Bounded, so that frames that are due leave in between.
            for _ in 0..64 {
                let Some(frame) = interface.receive(&mut buffer)? else { break };
                path.offer(begin.elapsed(), frame);
            }
        }
        // An outage is one of both directions.
        let first = paths.iter().filter_map(|path| path.first).min();
        for path in paths.iter_mut() {
            path.first = first;
        }
        if args.carrier
            && let Some(outage) = first.and_then(|first| args.faults.outage(first))
        {
            let up = !outage.contains(&begin.elapsed());
            if up != is_up {
                for interface in interfaces {
                    interface.set_up(up)?;
                }
                is_up = up;
            }
        }
        for (path, to) in paths.iter_mut().zip([&interfaces[1], &interfaces[0]]) {
            while let Some(frame) = path.take(begin.elapsed()) {
                refused += u64::from(!to.send(&frame) && is_up);
            }
        }
    }
    let mut counts = Counts::default();
    for path in &*paths {
        counts += path.counts;
    }
    if refused > 0 {
        println!("refused by the interfaces: {refused}");
    }
    if counts.too_long > 0 {
        bail!("{} batches instead of packets: turn the hosts' offloads off", counts.too_long);
    }
    Ok(counts)
}

/// Waits for a frame, for the next one that leaves, or a little.
fn wait(interfaces: &[Interface; 2], next: Option<Duration>, now: Duration) -> anyhow::Result<()> {
    const LONGEST: Duration = Duration::from_millis(10);
    let wait = next.map_or(LONGEST, |next| next.saturating_sub(now).min(LONGEST));
    let timeout = libc::timespec { tv_sec: 0, tv_nsec: wait.as_nanos() as libc::c_long };
    let mut fds = interfaces.each_ref().map(|interface| libc::pollfd {
        fd: interface.fd(),
        events: libc::POLLIN,
        revents: 0,
    });
    // SAFETY: two live descriptors, a live time, no mask.
    let ready = unsafe { libc::ppoll(fds.as_mut_ptr(), 2, &raw const timeout, std::ptr::null()) };
    if ready < 0 {
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(error.into());
        }
    }
    Ok(())
}
