//! The destination of the device's log: stderr, filtered by `ANYVERBS_LOG` (levels of all or of modules; default `warn`).

use std::{
    cell::Cell,
    io::{self, Write},
    sync::Once,
};

use tracing::{Event, Subscriber};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::{Layer, layer::Context, layer::SubscriberExt as _};

/// Drops messages of a thread whose own variables were destroyed, as in an exit handler: the formatter needs one of
/// them.
struct WhileThreadLives;

/// Something to destroy.
struct Alive;

impl Drop for Alive {
    fn drop(&mut self) {}
}

impl<S: Subscriber> Layer<S> for WhileThreadLives {
    fn event_enabled(&self, _: &Event<'_>, _: Context<'_, S>) -> bool {
        thread_local!(static ALIVE: Alive = const { Alive });
        ALIVE.try_with(|_| ()).is_ok()
    }
}

thread_local!(static IS_MUTE: Cell<bool> = const { Cell::new(false) });

/// The target of a line that nobody sees.
const PREPARES: &str = "anyverbs_prepares";

/// Makes the variables of this thread that a line of the log needs, and those of a refusal. They have destructors
/// ([`anyverbs_check::init`]).
pub(crate) fn prepare() {
    crate::errno::prepare();
    IS_MUTE.set(true);
    tracing::error!(target: PREPARES, "the thread can log");
    IS_MUTE.set(false);
}

/// The process's stderr. Unlike write(2) this is no cancellation point, and it does not take the standard library's
/// lock. The caller may hold locks, and may be a thread that the program cancels.
struct Stderr;

impl io::Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if IS_MUTE.get() {
            return Ok(bytes.len());
        }
        // SAFETY: the bytes live.
        let n = unsafe {
            libc::syscall(libc::SYS_write, libc::STDERR_FILENO, bytes.as_ptr(), bytes.len())
        };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The beginning of the names of all that logs here.
const OURS: &str = "anyverbs";
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// A filter, or why the text is none. `tracing` takes a misspelt level for the name of a module, and would show nothing.
fn filter(wanted: &str) -> Result<Targets, String> {
    let filter: Targets = wanted.parse().map_err(|error| format!("{error}"))?;
    let names = wanted.split(',').map(|part| part.split('=').next().unwrap_or_default());
    for name in names.map(str::trim).filter(|name| !name.is_empty()) {
        let is_level = LEVELS.iter().any(|level| level.eq_ignore_ascii_case(name))
            || matches!(name.parse(), Ok(0..=5_u8));
        if !is_level && !name.starts_with(OURS) {
            return Err(format!("{name:?} is neither a level nor a module of the device"));
        }
    }
    Ok(filter)
}

/// More than the log and a list of devices take.
pub(crate) const ROOM: usize = 1 << 20;

/// Sets the log up, once, at the first call that looks for a device.
///
/// Losing a line is no reason to stop a program: a closed stderr is ignored.
pub(crate) fn init() {
    static ONCE: Once = Once::new();
    // Without memory the log would end the program before the device can refuse.
    if !ONCE.is_completed() && anyverbs::check_room(ROOM).is_err() {
        let _ = Stderr.write(b"ERROR anyverbs: there is no memory for a device (ulimit -v)\n");
        return;
    }
    ONCE.call_once(|| {
        let wanted = anyverbs_environment::text("ANYVERBS_LOG").unwrap_or_default();
        let default = Targets::new().with_default(LevelFilter::WARN);
        let (filter, bad) = match filter(&wanted) {
            Ok(filter) if !wanted.is_empty() => (filter, None),
            Ok(_) => (default, None),
            Err(error) => (default, Some(error)),
        };
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(LevelFilter::TRACE)
            .with_writer(|| Stderr)
            // SAFETY: isatty takes any descriptor.
            .with_ansi(unsafe { libc::isatty(libc::STDERR_FILENO) } == 1)
            .without_time()
            .log_internal_errors(false)
            .finish()
            .with(WhileThreadLives)
            .with(filter.with_target(PREPARES, LevelFilter::ERROR));
        // No other code in this object sets one.
        let _ = tracing::subscriber::set_global_default(subscriber);
        crate::faults::init();
        if let Some(error) = bad {
            tracing::warn!(
                "ANYVERBS_LOG={wanted:?} is not a filter ({error}); for instance: warn, debug"
            );
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_level_is_no_filter() {
        for wanted in [
            "",
            "warn",
            "WARN",
            "off",
            "3",
            "anyverbs_transport=debug,warn",
            "info,anyverbs::counters=trace",
        ] {
            assert!(filter(wanted).is_ok(), "{wanted}");
        }
        for wanted in
            ["warning", "eror", "bogus", "warn,bogus", "warning=debug", "anyverbs=loud", "9"]
        {
            assert!(filter(wanted).is_err(), "{wanted}");
        }
    }
}
