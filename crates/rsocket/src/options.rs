//! Socket options.

use std::time::Duration;

use crate::config::{self, config};
use crate::errno::{Errno, Result};

/// Longest time, in seconds, for which a closed socket waits until all has left and the peer's device has it, unless
/// `SO_LINGER` says otherwise. A peer that has stopped reading must not hold its sender for ever (test
/// `a_close_does_not_wait_for_ever`).
pub(crate) const LINGER: Duration = Duration::from_secs(10);

/// Level of the options of RDMA (`SOL_RDMA` of `rsocket.h`).
pub const SOL_RDMA: i32 = 0x10000;
/// Work requests of the send queue.
pub const RDMA_SQSIZE: i32 = 0;
/// Work requests of the receive queue.
pub const RDMA_RQSIZE: i32 = 1;
/// Bytes of inline data.
pub const RDMA_INLINE: i32 = 2;
/// Entries of the I/O map.
pub const RDMA_IOMAPSIZE: i32 = 3;
/// The path.
pub const RDMA_ROUTE: i32 = 4;
/// Bytes that can be read at once, as `FIONREAD` says of a socket; not rdma-core's.
pub const RDMA_UNREAD: i32 = 0x100;

/// `SO_LINGER`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Linger {
    pub(crate) on: bool,
    pub(crate) seconds: i32,
}

/// The options that a program may set. New sockets of a listener begin with the listener's.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) recv_buffer: u32,
    pub(crate) send_buffer: u32,
    pub(crate) send_queue: u16,
    pub(crate) recv_queue: u16,
    pub(crate) inline: u16,
    pub(crate) iomap_len: u16,
    pub(crate) reuse_addr: bool,
    pub(crate) v6_only: bool,
    pub(crate) keepalive: bool,
    pub(crate) keep_idle: i32,
    pub(crate) keep_interval: i32,
    pub(crate) keep_count: i32,
    pub(crate) oob_inline: bool,
    pub(crate) no_delay: bool,
    pub(crate) linger: Linger,
    pub(crate) recv_timeout: Option<Duration>,
    pub(crate) send_timeout: Option<Duration>,
}

impl Options {
    pub(crate) fn new() -> Self {
        let config = config();
        Self {
            recv_buffer: config.recv_buffer,
            send_buffer: config.send_buffer,
            send_queue: config.send_queue,
            recv_queue: config.recv_queue,
            inline: config.inline,
            iomap_len: config.iomap_len,
            reuse_addr: false,
            v6_only: false,
            keepalive: false,
            keep_idle: 7200,
            keep_interval: 75,
            keep_count: 9,
            oob_inline: false,
            no_delay: false,
            linger: Linger { on: false, seconds: 0 },
            recv_timeout: None,
            send_timeout: None,
        }
    }

    /// Sets an option that nothing but the socket itself needs to know. `sized`: the buffers and queues are there.
    pub(crate) fn set(&mut self, level: i32, name: i32, value: &[u8], sized: bool) -> Result<()> {
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_REUSEADDR) => self.reuse_addr = flag(value)?,
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => self.keepalive = flag(value)?,
            (libc::SOL_SOCKET, libc::SO_OOBINLINE) => self.oob_inline = flag(value)?,
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => {
                let size = doubled(value)?;
                if !sized {
                    self.recv_buffer = size;
                }
            }
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => {
                let size = doubled(value)?;
                if !sized {
                    self.send_buffer = size;
                }
            }
            (libc::SOL_SOCKET, libc::SO_LINGER) => {
                let [on, seconds] = [int(value)?, int(value.get(4..).unwrap_or_default())?];
                self.linger = Linger { on: on != 0, seconds };
            }
            (libc::SOL_SOCKET, libc::SO_RCVTIMEO) => self.recv_timeout = timeout(value)?,
            (libc::SOL_SOCKET, libc::SO_SNDTIMEO) => self.send_timeout = timeout(value)?,
            (libc::IPPROTO_TCP, libc::TCP_NODELAY) => self.no_delay = flag(value)?,
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => self.keep_idle = positive(value)?,
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL) => self.keep_interval = positive(value)?,
            (libc::IPPROTO_TCP, libc::TCP_KEEPCNT) => self.keep_count = positive(value)?,
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => _ = int(value)?,
            (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => self.v6_only = flag(value)?,
            (SOL_RDMA, _) if sized => return Err(Errno(libc::EINVAL)),
            (SOL_RDMA, RDMA_SQSIZE) => self.send_queue = config::queue(unsigned(value)?),
            (SOL_RDMA, RDMA_RQSIZE) => self.recv_queue = config::queue(unsigned(value)?),
            (SOL_RDMA, RDMA_INLINE) => {
                self.inline = unsigned(value)?.min(config::MAX_INLINE.into()) as u16;
            }
            (SOL_RDMA, RDMA_IOMAPSIZE) => self.iomap_len = config::iomap_len(unsigned(value)?),
            _ => return Err(Errno(libc::ENOPROTOOPT)),
        }
        Ok(())
    }

    /// The value of an option that the socket alone knows.
    pub(crate) fn get(&self, level: i32, name: i32) -> Result<Value> {
        let int = |v: u32| Ok(Value::int(v as i32));
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_REUSEADDR) => int(self.reuse_addr.into()),
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => int(self.keepalive.into()),
            (libc::SOL_SOCKET, libc::SO_OOBINLINE) => int(self.oob_inline.into()),
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => int(self.recv_buffer),
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => int(self.send_buffer),
            (libc::SOL_SOCKET, libc::SO_LINGER) => {
                Ok(Value::ints(&[self.linger.on.into(), self.linger.seconds]))
            }
            (libc::SOL_SOCKET, libc::SO_RCVTIMEO) => Ok(Value::timeval(self.recv_timeout)),
            (libc::SOL_SOCKET, libc::SO_SNDTIMEO) => Ok(Value::timeval(self.send_timeout)),
            (libc::IPPROTO_TCP, libc::TCP_NODELAY) => int(self.no_delay.into()),
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => Ok(Value::int(self.keep_idle)),
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL) => Ok(Value::int(self.keep_interval)),
            (libc::IPPROTO_TCP, libc::TCP_KEEPCNT) => Ok(Value::int(self.keep_count)),
            (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => int(self.v6_only.into()),
            (SOL_RDMA, RDMA_SQSIZE) => int(self.send_queue.into()),
            (SOL_RDMA, RDMA_RQSIZE) => int(self.recv_queue.into()),
            (SOL_RDMA, RDMA_INLINE) => int(self.inline.into()),
            (SOL_RDMA, RDMA_IOMAPSIZE) => int(self.iomap_len.into()),
            _ => Err(Errno(libc::ENOPROTOOPT)),
        }
    }
}

/// An option's value, as bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Value {
    bytes: [u8; 72],
    len: usize,
}

impl Value {
    pub(crate) fn new(of: &[u8]) -> Self {
        let len = of.len().min(72);
        let mut bytes = [0; 72];
        bytes[..len].copy_from_slice(&of[..len]);
        Self { bytes, len }
    }

    pub(crate) fn int(value: i32) -> Self {
        Self::new(&value.to_ne_bytes())
    }

    fn ints(values: &[i32; 2]) -> Self {
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&values[0].to_ne_bytes());
        bytes[4..].copy_from_slice(&values[1].to_ne_bytes());
        Self::new(&bytes)
    }

    fn timeval(timeout: Option<Duration>) -> Self {
        let timeout = timeout.unwrap_or_default();
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&timeout.as_secs().to_ne_bytes());
        bytes[8..].copy_from_slice(&u64::from(timeout.subsec_micros()).to_ne_bytes());
        Self::new(&bytes)
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

pub(crate) fn int(value: &[u8]) -> Result<i32> {
    value.first_chunk().map(|bytes| i32::from_ne_bytes(*bytes)).ok_or(Errno(libc::EINVAL))
}

pub(crate) fn flag(value: &[u8]) -> Result<bool> {
    Ok(int(value)? != 0)
}

fn positive(value: &[u8]) -> Result<i32> {
    Some(int(value)?).filter(|n| *n > 0).ok_or(Errno(libc::EINVAL))
}

fn unsigned(value: &[u8]) -> Result<u64> {
    Ok((int(value)? as u32).into())
}

/// A buffer's size as `SO_RCVBUF` and `SO_SNDBUF` take it: the system doubles it (`socket(7)`).
fn doubled(value: &[u8]) -> Result<u32> {
    Ok(config::buffer(unsigned(value)? << 1))
}

/// `struct timeval`; zero is none.
fn timeout(value: &[u8]) -> Result<Option<Duration>> {
    let number = |at: usize| {
        let bytes = value.get(at..at + 8)?.first_chunk::<8>()?;
        Some(i64::from_ne_bytes(*bytes))
    };
    let (Some(seconds), Some(micros)) = (number(0), number(8)) else {
        return Err(Errno(libc::EINVAL));
    };
    let micros = u32::try_from(micros).ok().filter(|m| *m < 1_000_000).ok_or(Errno(libc::EDOM))?;
    let Ok(seconds) = u64::try_from(seconds) else { return Ok(Some(Duration::ZERO)) };
    let timeout = Duration::new(seconds, micros * 1000);
    Ok(Some(timeout).filter(|t| !t.is_zero()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back() {
        let mut options = Options::new();
        for (level, name, set, got) in [
            (libc::SOL_SOCKET, libc::SO_REUSEADDR, 5, 1),
            (libc::SOL_SOCKET, libc::SO_RCVBUF, 50_000, 100_000),
            (libc::SOL_SOCKET, libc::SO_SNDBUF, 1, 4096),
            (libc::SOL_SOCKET, libc::SO_SNDBUF, -1, 1 << 30),
            (libc::IPPROTO_TCP, libc::TCP_NODELAY, 1, 1),
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 9, 9),
            (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1, 1),
            (SOL_RDMA, RDMA_SQSIZE, 3, 16),
            (SOL_RDMA, RDMA_RQSIZE, 100, 100),
            (SOL_RDMA, RDMA_INLINE, 4096, 1024),
            (SOL_RDMA, RDMA_IOMAPSIZE, 129, 128),
            (SOL_RDMA, RDMA_IOMAPSIZE, 100, 100),
        ] {
            options.set(level, name, &i32::to_ne_bytes(set), false).unwrap();
            assert_eq!(options.get(level, name).unwrap(), Value::int(got), "{level} {name}");
        }
        let linger = [1i32.to_ne_bytes(), 7i32.to_ne_bytes()].concat();
        options.set(libc::SOL_SOCKET, libc::SO_LINGER, &linger, false).unwrap();
        assert_eq!(options.get(libc::SOL_SOCKET, libc::SO_LINGER).unwrap().bytes(), linger);
        let time = [1i64.to_ne_bytes(), 500_000i64.to_ne_bytes()].concat();
        options.set(libc::SOL_SOCKET, libc::SO_RCVTIMEO, &time, false).unwrap();
        assert_eq!(options.recv_timeout, Some(Duration::from_millis(1500)));
        assert_eq!(options.get(libc::SOL_SOCKET, libc::SO_RCVTIMEO).unwrap().bytes(), time);
    }

    #[test]
    fn invalid_options_are_refused() {
        let mut options = Options::new();
        let one = 1i32.to_ne_bytes();
        let mut refused = |level, name, value: &[u8], sized| {
            options.set(level, name, value, sized).unwrap_err().0
        };
        assert_eq!(refused(libc::SOL_SOCKET, libc::SO_REUSEADDR, &[1], false), libc::EINVAL);
        assert_eq!(refused(libc::SOL_SOCKET, 9999, &one, false), libc::ENOPROTOOPT);
        assert_eq!(refused(libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, &[0; 4], false), libc::EINVAL);
        assert_eq!(refused(SOL_RDMA, RDMA_SQSIZE, &one, true), libc::EINVAL);
        assert_eq!(refused(libc::SOL_SOCKET, libc::SO_LINGER, &one, false), libc::EINVAL);
        assert_eq!(refused(libc::SOL_SOCKET, libc::SO_RCVTIMEO, &[0xff; 16], false), libc::EDOM);
        options.set(libc::SOL_SOCKET, libc::SO_RCVBUF, &[0xff; 4], true).unwrap();
        assert_eq!(options.recv_buffer, config().recv_buffer, "it is there already");
    }
}
