//! Messages between the processes of one user and host, whole and in order, for rare events. Unlike a forwarded
//! datagram ([`crate::udp::forward`]), none is lost while both processes live, and a process learns of the end of the other.
//!
//! Each process that takes part listens ([`crate::host`]). A connection carries messages one way, from the process that
//! made it. Its first message is the sender's slot. Connections of other users are closed unread.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use anyverbs_locks::{Mutex, rank};
use socket2::{Domain, Socket, Type};

use crate::host::{Name, Slot};
use crate::sys::{self, Uncancelled};

/// The longest message.
pub const MAX_MESSAGE: usize = 80 << 10;
/// Most bytes that wait for room at one other process; more is refused.
const KEEP: usize = 8 << 20;
/// Messages of one connection that are read in one go.
const BUDGET: usize = 64;

/// Whether a message may be refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Refused if much waits for the other process already. Such a message is sent again, or the next one says as much.
    Refusable,
    /// Never refused, since no one would repeat it. For rare messages.
    Owed,
}

/// Results of [`Messages::wait`].
#[derive(Debug)]
pub enum Told<'a> {
    /// A message of the process with this slot.
    Message(u8, &'a [u8]),
    /// The process has ended, after all its messages, or has broken the connection.
    Ended(u8),
}

/// The messages of one process.
#[derive(Debug)]
pub struct Messages {
    slot: Arc<Slot>,
    listener: Socket,
    /// Ends the wait of [`wait`](Self::wait) for descriptors that it does not know yet.
    wake: Socket,
    woken: Socket,
    outgoing: Mutex<rank::MessagesOut, HashMap<u8, Outgoing>>,
    /// Connections that the single waiting thread reads.
    incoming: Mutex<rank::MessagesIn, Vec<Connection>>,
}

#[derive(Debug)]
struct Outgoing {
    socket: Socket,
    waiting: VecDeque<Box<[u8]>>,
    bytes: usize,
}

#[derive(Debug)]
struct Connection {
    socket: Socket,
    /// None until it said so.
    slot: Option<u8>,
    ended: bool,
}

impl Messages {
    /// Listens for messages to the owner of `slot`.
    ///
    /// # Errors
    /// Those of socket(2), bind(2) and listen(2).
    pub fn listen(slot: Arc<Slot>) -> io::Result<Self> {
        let listener = slot.registry().listen(Name::Messages(slot.number()))?;
        let (wake, woken) = Socket::pair(Domain::UNIX, Type::DGRAM, None)?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        Ok(Self {
            slot,
            listener,
            wake,
            woken,
            outgoing: Mutex::default(),
            incoming: Mutex::default(),
        })
    }

    /// Sends a message. Never waits: a message without room is kept, in order.
    ///
    /// # Errors
    /// `ConnectionRefused` if no process listens, `WouldBlock` if the other has not read for long and the message may
    /// be refused, `PermissionDenied` if the listener is another user's, and those of socket(2).
    pub fn send(&self, slot: u8, message: &[u8], delivery: Delivery) -> io::Result<()> {
        // Called below the device's locks, by any thread of the program.
        let _uncancelled = Uncancelled::new();
        let mut outgoing = self.outgoing.lock();
        let to = match outgoing.entry(slot) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let to = entry.insert(self.connect(slot)?);
                self.wake_up();
                to
            }
        };
        if to.waiting.is_empty() {
            match send(&to.socket, message) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wake_up(),
                other => return other,
            }
        }
        if delivery == Delivery::Refusable && to.bytes + message.len() > KEEP {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        to.bytes += message.len();
        to.waiting.push_back(message.into());
        Ok(())
    }

    fn connect(&self, slot: u8) -> io::Result<Outgoing> {
        let (socket, _) = self.slot.registry().connect(Name::Messages(slot))?;
        send(&socket, &[self.slot.number()])?;
        Ok(Outgoing { socket, waiting: VecDeque::new(), bytes: 0 })
    }

    fn wake_up(&self) {
        // A full queue wakes as well.
        let _ = self.wake.send(&[0]);
    }

    /// Waits for something to tell, and tells it. For one thread, in a loop.
    ///
    /// # Errors
    /// Those of poll(2).
    pub fn wait(
        &self,
        buffer: &mut MessageBuffer,
        tell: &mut dyn FnMut(Told<'_>),
    ) -> io::Result<()> {
        let mut incoming = self.incoming.lock();
        let (mut set, slots) = self.watched(&incoming);
        if sys::poll(&mut set, -1) < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) };
        }
        while self.woken.recv(&mut [MaybeUninit::uninit(); 8]).is_ok() {}
        let (from, to) = set[2..].split_at(incoming.len());
        for (from, ready) in incoming.iter_mut().zip(from) {
            if ready.revents != 0 {
                from.receive(BUDGET, buffer, tell);
            }
        }
        let mut ended: Vec<u8> =
            incoming.iter().filter(|from| from.ended).filter_map(|from| from.slot).collect();
        for (slot, ready) in slots.into_iter().zip(to) {
            if ready.revents & (libc::POLLHUP | libc::POLLERR) != 0 {
                ended.push(slot);
            } else if ready.revents & libc::POLLOUT != 0 {
                self.send_waiting(slot);
            }
        }
        ended.sort_unstable();
        ended.dedup();
        // An ended process may have sent its first messages just before, on a connection that was not looked at yet.
        self.accept(&mut incoming);
        for slot in ended {
            self.outgoing.lock().remove(&slot);
            // Its messages from before its end.
            for from in incoming.iter_mut().filter(|from| from.slot.is_none_or(|of| of == slot)) {
                from.receive(usize::MAX, buffer, tell);
                from.ended |= from.slot == Some(slot);
            }
            tell(Told::Ended(slot));
        }
        incoming.retain(|from| !from.ended);
        Ok(())
    }

    /// The descriptors to watch: the waker, the listener, the connections to here, and those from here to these slots.
    fn watched(&self, incoming: &[Connection]) -> (Vec<libc::pollfd>, Vec<u8>) {
        let watch =
            |socket: &Socket, events| libc::pollfd { fd: socket.as_raw_fd(), events, revents: 0 };
        let mut set = vec![watch(&self.woken, libc::POLLIN), watch(&self.listener, libc::POLLIN)];
        set.extend(incoming.iter().map(|from| watch(&from.socket, libc::POLLIN)));
        let mut slots = Vec::new();
        for (slot, to) in &*self.outgoing.lock() {
            let events = if to.waiting.is_empty() { 0 } else { libc::POLLOUT };
            set.push(watch(&to.socket, events));
            slots.push(*slot);
        }
        (set, slots)
    }

    fn send_waiting(&self, slot: u8) {
        let mut outgoing = self.outgoing.lock();
        let Some(to) = outgoing.get_mut(&slot) else { return };
        while let Some(message) = to.waiting.front() {
            match send(&to.socket, message) {
                Ok(()) => {
                    to.bytes -= message.len();
                    to.waiting.pop_front();
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // Its end is about to be seen.
                Err(_) => {
                    to.waiting.clear();
                    to.bytes = 0;
                }
            }
        }
    }

    fn accept(&self, incoming: &mut Vec<Connection>) {
        loop {
            match self.slot.registry().accept(&self.listener) {
                Ok(socket) => incoming.push(Connection { socket, slot: None, ended: false }),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
                Err(_) => return,
            }
        }
    }
}

impl Connection {
    /// Reads up to that many messages.
    fn receive(
        &mut self,
        budget: usize,
        buffer: &mut MessageBuffer,
        tell: &mut dyn FnMut(Told<'_>),
    ) {
        for _ in 0..budget {
            let message = match buffer.receive(&self.socket) {
                Ok([]) => {
                    self.ended = true;
                    return;
                }
                Ok(message) => message,
                Err(error) => {
                    self.ended = error.kind() != io::ErrorKind::WouldBlock;
                    return;
                }
            };
            match self.slot {
                Some(slot) => tell(Told::Message(slot, message)),
                None => self.slot = Some(message[0]),
            }
        }
    }
}

/// A reused buffer for [`Messages::wait`].
pub struct MessageBuffer(Box<[u8]>);

impl MessageBuffer {
    /// A buffer for the longest message.
    #[must_use]
    pub fn new() -> Self {
        Self(vec![0; MAX_MESSAGE].into())
    }

    /// The next message; empty at the end.
    fn receive(&mut self, mut socket: &Socket) -> io::Result<&[u8]> {
        let len = loop {
            match socket.read(&mut self.0) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        Ok(&self.0[..len])
    }
}

impl Default for MessageBuffer {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for MessageBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MessageBuffer").finish_non_exhaustive()
    }
}

fn send(socket: &Socket, message: &[u8]) -> io::Result<()> {
    loop {
        match socket.send_with_flags(message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other.map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(test: &str) -> [Messages; 2] {
        let registry = crate::Registry::new(&format!("av-{test}-{}", std::process::id())).unwrap();
        [(); 2].map(|()| Messages::listen(Arc::new(Slot::claim_in(&registry).unwrap())).unwrap())
    }

    /// The results of the next wait that has any.
    fn told(to: &Messages) -> Vec<(u8, Option<Vec<u8>>)> {
        let (mut buffer, mut told) = (MessageBuffer::new(), Vec::new());
        while told.is_empty() {
            to.wait(&mut buffer, &mut |what| match what {
                Told::Message(slot, bytes) => told.push((slot, Some(bytes.to_vec()))),
                Told::Ended(slot) => told.push((slot, None)),
            })
            .unwrap();
        }
        told
    }

    #[test]
    fn messages_come_whole_and_in_order_and_then_the_end() {
        let [a, b] = pair("order");
        let (from, to) = (a.slot.number(), b.slot.number());
        a.send(to, b"one message", Delivery::Owed).unwrap();
        assert_eq!(told(&b), [(from, Some(b"one message".to_vec()))]);
        // More than the kernel keeps: the rest waits here, and goes when there is room.
        const COUNT: u32 = 200;
        for n in 0..COUNT {
            let mut message = vec![7; 4 + (16 << 10)];
            message[..4].copy_from_slice(&n.to_le_bytes());
            a.send(to, &message, Delivery::Refusable).unwrap();
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut next = 0u32;
                while next < COUNT {
                    for (_, message) in told(&b) {
                        let message = message.unwrap();
                        assert_eq!(
                            (message.len(), &message[..4]),
                            (4 + (16 << 10), &next.to_le_bytes()[..])
                        );
                        next += 1;
                    }
                }
                // The other may stop waiting.
                b.send(from, b"done", Delivery::Owed).unwrap();
            });
            assert_eq!(told(&a), [(to, Some(b"done".to_vec()))]);
        });
        a.send(to, b"last", Delivery::Owed).unwrap();
        drop(a);
        let mut last = told(&b);
        if last.len() == 1 {
            last.extend(told(&b));
        }
        assert_eq!(last, [(from, Some(b"last".to_vec())), (from, None)]);
        let error = b.send(from, b"x", Delivery::Owed).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn first_messages_of_an_ended_process_come_before_its_end() {
        let [a, b] = pair("first");
        let (from, to) = (b.slot.number(), a.slot.number());
        a.send(from, b"question", Delivery::Owed).unwrap();
        assert_eq!(told(&b), [(to, Some(b"question".to_vec()))]);
        // `a` sees none of it before all of it has happened.
        b.send(to, b"answer", Delivery::Owed).unwrap();
        drop(b);
        assert_eq!(told(&a), [(from, Some(b"answer".to_vec())), (from, None)]);
    }

    #[test]
    fn sending_never_waits_for_a_process_that_ignores_it() {
        let [a, b] = pair("full");
        let to = b.slot.number();
        let mut sent = 0;
        let refused = loop {
            match a.send(to, &[0; 64 << 10], Delivery::Refusable) {
                Ok(()) => sent += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        // Messages that no one would repeat are kept all the same, and come when they are read.
        a.send(to, b"owed", Delivery::Owed).unwrap();
        let (mut received, mut last) = (0, Vec::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while received <= sent {
                    for (_, message) in told(&b) {
                        (received, last) = (received + 1, message.unwrap());
                    }
                }
                b.send(a.slot.number(), b"done", Delivery::Owed).unwrap();
            });
            assert_eq!(told(&a), [(to, Some(b"done".to_vec()))]);
        });
        assert_eq!((received, &last[..]), (sent + 1, &b"owed"[..]));
    }

    #[test]
    fn all_messages_of_an_ended_process_come_before_its_end() {
        // More than are read in one go, by a connection that is known already, beside one of a process that lives.
        const COUNT: u8 = BUDGET as u8 + 30;
        let registry = crate::Registry::new(&format!("av-all-{}", std::process::id())).unwrap();
        let listen = || Messages::listen(Arc::new(Slot::claim_in(&registry).unwrap())).unwrap();
        let (a, b, c) = (listen(), listen(), listen());
        let [to, ends, lives] = [&a, &b, &c].map(|messages| messages.slot.number());
        a.send(ends, b"question", Delivery::Owed).unwrap();
        a.send(lives, b"question", Delivery::Owed).unwrap();
        for from in [&b, &c] {
            from.send(to, b"hello", Delivery::Owed).unwrap();
        }
        let mut heard = Vec::new();
        while heard.len() < 2 {
            heard.extend(told(&a));
        }
        for n in 0..COUNT {
            b.send(to, &[n], Delivery::Owed).unwrap();
        }
        drop(b);
        c.send(to, b"alive", Delivery::Owed).unwrap();
        let mut heard = Vec::new();
        while heard.len() < usize::from(COUNT) + 2 {
            heard.extend(told(&a));
        }
        let of = |slot| heard.iter().filter(move |(from, _)| *from == slot).map(|(_, m)| m.clone());
        let mut wanted: Vec<_> = (0..COUNT).map(|n| Some(vec![n])).collect();
        wanted.push(None);
        assert_eq!(of(ends).collect::<Vec<_>>(), wanted);
        assert_eq!(of(lives).collect::<Vec<_>>(), [Some(b"alive".to_vec())]);
        // The connection to the one that lives is still there.
        a.send(lives, b"and you", Delivery::Owed).unwrap();
        c.send(to, b"yes", Delivery::Owed).unwrap();
        assert_eq!(told(&a), [(lives, Some(b"yes".to_vec()))]);
    }

    /// poll(2) refuses more descriptors than a process may have.
    #[test]
    fn a_wait_that_cannot_be_is_an_error() {
        anyverbs_testing::in_own_process(
            "messages::tests::a_wait_that_cannot_be_is_an_error",
            || {
                let [a, _b] = pair("poll");
                let none = libc::rlimit { rlim_cur: 1, rlim_max: 1 };
                // SAFETY: a live value, and the process ends with this test.
                assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) }, 0);
                let error = a.wait(&mut MessageBuffer::new(), &mut |_| {}).unwrap_err();
                assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
            },
        );
    }

    #[test]
    fn a_signal_ends_a_wait_without_an_error() {
        extern "C" fn nothing(_: libc::c_int) {}
        let [a, _b] = pair("signal");
        // SAFETY: the handler does nothing, and without SA_RESTART the wait ends by it.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
            assert_eq!(libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut()), 0);
        }
        // SAFETY: it has no conditions.
        let waiting = unsafe { libc::pthread_self() };
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Acquire) {
                    // SAFETY: the thread waits for this one.
                    unsafe { libc::pthread_kill(waiting, libc::SIGUSR2) };
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
            });
            let waited = a.wait(&mut MessageBuffer::new(), &mut |_| panic!("nothing to tell"));
            done.store(true, std::sync::atomic::Ordering::Release);
            waited.unwrap();
        });
    }
}
