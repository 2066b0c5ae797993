//! Defaults that an administrator sets: a file for each, with one number (`rsocket(7)`).

use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

/// The folder of the files.
const DIRECTORY: &str = "/etc/rdma/rsocket";
/// Names another directory.
const VARIABLE: &str = "ANYVERBS_RSOCKET_CONFIG";

/// Sizes of buffers smaller than this are of no use.
pub(crate) const MIN_BUFFER: u32 = 4096;
/// Sizes of buffers that an option may ask for at most; the rings' offsets are 32 bits.
pub(crate) const MAX_BUFFER: u32 = 1 << 30;
/// Sizes of queues.
pub(crate) const MIN_QUEUE: u16 = 16;
pub(crate) const MAX_QUEUE: u16 = 16_000;
/// Bytes of inline data that the device takes.
pub(crate) const MAX_INLINE: u16 = 1024;

/// The initial settings of new sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// `mem_default`: bytes of the receive buffer.
    pub recv_buffer: u32,
    /// `wmem_default`: bytes of the send buffer.
    pub send_buffer: u32,
    /// `sqsize_default`: work requests of the send queue.
    pub send_queue: u16,
    /// `rqsize_default`: work requests of the receive queue.
    pub recv_queue: u16,
    /// `inline_default`: bytes that are sent without the buffer.
    pub inline: u16,
    /// `iomap_size`: entries of the I/O map.
    pub iomap_len: u16,
    /// `polling_time`: how long a call polls before it sleeps.
    pub polling_time: Duration,
    /// `wake_up_interval`: how long `rpoll` sleeps at most before it looks itself.
    pub wake_up_interval: Duration,
}

/// Default of `polling_time`, in microseconds, as librdmacm has it: an answer that comes sooner costs no sleep
/// (`defaults_are_those_of_librdmacm`).
const POLLING_TIME: Duration = Duration::from_micros(10);
/// Default of `wake_up_interval`, in seconds, as librdmacm has it. It bounds the harm of a wake-up that is lost, and costs nothing
/// beside a sleep so long (`defaults_are_those_of_librdmacm`).
const WAKE_UP_INTERVAL: Duration = Duration::from_secs(5);

impl Default for Config {
    fn default() -> Self {
        Self {
            recv_buffer: 128 << 10,
            send_buffer: 128 << 10,
            send_queue: 384,
            recv_queue: 384,
            inline: 64,
            iomap_len: 0,
            polling_time: POLLING_TIME,
            wake_up_interval: WAKE_UP_INTERVAL,
        }
    }
}

impl Config {
    /// Reads a directory. A file that is missing, or holds no number, leaves the default.
    #[must_use]
    pub fn read(directory: &Path) -> Self {
        let mut config = Self::default();
        let number = |name: &str| -> Option<u64> {
            let text = std::fs::read_to_string(directory.join(name)).ok()?;
            let value = text.split_whitespace().next()?.parse().ok();
            if value.is_none() {
                tracing::warn!(file = name, "not a number: {:?}", text.trim());
            }
            value
        };
        if let Some(n) = number("mem_default") {
            config.recv_buffer = buffer(n);
        }
        if let Some(n) = number("wmem_default") {
            config.send_buffer = buffer(n);
        }
        if let Some(n) = number("sqsize_default") {
            config.send_queue = queue(n);
        }
        if let Some(n) = number("rqsize_default") {
            config.recv_queue = queue(n);
        }
        if let Some(n) = number("inline_default") {
            config.inline = n.min(MAX_INLINE.into()) as u16;
        }
        if let Some(n) = number("iomap_size") {
            config.iomap_len = iomap_len(n);
        }
        if let Some(n) = number("polling_time") {
            config.polling_time = Duration::from_micros(n.min(1_000_000));
        }
        if let Some(n) = number("wake_up_interval").filter(|n| *n > 0) {
            config.wake_up_interval = Duration::from_millis(n.min(3_600_000));
        }
        config
    }
}

/// The process's configuration, read at first use.
pub(crate) fn config() -> &'static Config {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(|| {
        let directory =
            anyverbs_environment::variable(VARIABLE).unwrap_or_else(|| DIRECTORY.into());
        Config::read(Path::new(&directory))
    })
}

/// A size of a buffer within its limits; even, since the receive buffer has two halves.
pub(crate) fn buffer(bytes: u64) -> u32 {
    bytes.clamp(MIN_BUFFER.into(), MAX_BUFFER.into()) as u32 & !1
}

/// A size of a queue within its limits.
pub(crate) fn queue(requests: u64) -> u16 {
    requests.clamp(MIN_QUEUE.into(), MAX_QUEUE.into()) as u16
}

/// A number of entries as the protocol can say it.
pub(crate) fn iomap_len(entries: u64) -> u16 {
    crate::wire::from_scale(crate::wire::to_scale(entries.min(u16::MAX.into()) as u16))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Programs were tuned with these.
    #[test]
    fn defaults_are_those_of_librdmacm() {
        let config = Config::default();
        assert_eq!((config.recv_buffer, config.send_buffer), (131_072, 131_072));
        assert_eq!((config.send_queue, config.recv_queue, config.inline), (384, 384, 64));
        assert_eq!(config.polling_time.as_micros(), 10);
        assert_eq!(config.wake_up_interval.as_millis(), 5000);
    }

    #[test]
    fn files_set_the_defaults_within_limits() {
        let directory =
            std::env::temp_dir().join(format!("anyverbs-rsocket-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        for (name, text) in [
            ("mem_default", "1000001\n"),
            ("wmem_default", "1"),
            ("sqsize_default", "99999999"),
            ("rqsize_default", "nonsense"),
            ("iomap_size", "130"),
            ("polling_time", "25\n"),
            ("wake_up_interval", "0"),
        ] {
            std::fs::write(directory.join(name), text).unwrap();
        }
        let config = Config::read(&directory);
        std::fs::remove_dir_all(&directory).unwrap();
        let expected = Config {
            recv_buffer: 1_000_000,
            send_buffer: MIN_BUFFER,
            send_queue: MAX_QUEUE,
            iomap_len: 128,
            polling_time: Duration::from_micros(25),
            ..Config::default()
        };
        assert_eq!(config, expected);
        assert_eq!(Config::read(Path::new("/nonexistent")), Config::default());
    }
}
