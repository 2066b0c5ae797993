//! Orders that other processes of the same user give, and the answers: one message each way over a connection to the slot of the process.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use crate::shm::peer_process;
use crate::sockopt;

use super::name::{Name, Registry};
use super::pass;

/// The longest message.
pub const MAX_ORDER: usize = 32 << 10;
/// Messages of others that wait. A further one is not answered.
const MOST_WAITING: usize = 16;

/// A message of another process of this user. The slot [answers](super::Slot::answer) it.
#[derive(Debug)]
pub struct Order {
    pub(super) key: u64,
    /// Anything.
    pub bytes: Vec<u8>,
}

/// Orders that wait, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Orders(VecDeque<Order>);

impl Orders {
    /// False if it is lost.
    pub(super) fn add(&mut self, key: u64, bytes: &[u8]) -> bool {
        let has_room = self.0.len() < MOST_WAITING;
        if has_room {
            self.0.push_back(Order { key, bytes: bytes.to_vec() });
        }
        has_room
    }

    /// A connection has ended: nobody waits for what is done.
    pub(super) fn forget(&mut self, key: u64) {
        self.0.retain(|order| order.key != key);
    }

    pub(super) fn take(&mut self) -> Option<Order> {
        self.0.pop_front()
    }
}

/// Tells the process that has a slot something, and returns its answer. Both ends ask the kernel for the user of the other one.
///
/// # Errors
/// `InvalidInput` for a message that is too long; `NotFound` if another process has the slot; `TimedOut` if it does not answer within
/// `patience`; those of a process that ends meanwhile.
pub fn tell(
    registry: &Registry,
    (slot, pid): (u8, i32),
    message: &[u8],
    patience: Duration,
) -> io::Result<Vec<u8>> {
    if message.is_empty() || message.len() > MAX_ORDER {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let (socket, _) = registry.connect(Name::Slot(slot))?;
    if peer_process(socket.as_fd())?.pid != pid {
        return Err(io::ErrorKind::NotFound.into());
    }
    pass::tell(&socket, message)?;
    let begin = Instant::now();
    let left = || patience.saturating_sub(begin.elapsed());
    loop {
        let timeout = left();
        let millis = timeout.as_millis().try_into().unwrap_or(i32::MAX);
        if sockopt::poll(socket.as_fd(), libc::POLLIN, millis)? {
            break;
        }
        if timeout.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    pass::answer_of(&socket, MAX_ORDER)
}
