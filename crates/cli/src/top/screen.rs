//! The terminal as a full screen: a few sequences that every terminal knows, and termios(3).

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::mem::{MaybeUninit, zeroed};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::time::Duration;

/// Another screen, without a cursor.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l";
const LEAVE: &[u8] = b"\x1b[?25h\x1b[?1049l";
/// The terminal's size where it tells none.
const SIZE: (usize, usize) = (80, 24);

/// The most that is written at once. A terminal that has room for anything mostly has room for that.
const PIECE: usize = 256;
/// Longest wait for room for the last bytes.
const LAST_WAIT: Duration = Duration::from_millis(300);

/// A wish of the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// Nothing; the time is over.
    None,
    Other,
    End,
    /// To see what is so many lines above.
    Up(usize),
    Down(usize),
}

/// The full screen, until this value is dropped.
#[derive(Debug)]
pub(super) struct Screen {
    before: libc::termios,
    out: File,
    /// The user wished to end while there was no room.
    ended: bool,
    /// Signals that would leave the terminal as it is now, and that of its size.
    signals: OwnedFd,
    mask: libc::sigset_t,
}

fn entry(fd: libc::c_int, events: libc::c_short) -> libc::pollfd {
    libc::pollfd { fd, events, revents: 0 }
}

/// How many entries have something; `None` if a signal came before.
fn poll(set: &mut [libc::pollfd], within: Option<Duration>) -> io::Result<Option<usize>> {
    let timeout = within.map_or(-1, |within| within.as_millis().min(60_000) as i32);
    // SAFETY: live entries, and their number.
    let n = unsafe { libc::poll(set.as_mut_ptr(), set.len() as libc::nfds_t, timeout) };
    if n < 0 {
        let error = io::Error::last_os_error();
        return if error.kind() == io::ErrorKind::Interrupted { Ok(None) } else { Err(error) };
    }
    Ok(Some(n as usize))
}

/// The terminal, opened anew: a write to it does not wait, and those of other programs do as before. Standard output where
/// that is refused.
fn output() -> io::Result<File> {
    let anew = OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open("/proc/self/fd/1");
    if let Ok(file) = anew {
        return Ok(file);
    }
    // SAFETY: a new descriptor, which nobody else has, or an error.
    unsafe {
        let fd = libc::fcntl(libc::STDOUT_FILENO, libc::F_DUPFD_CLOEXEC, 0);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(File::from_raw_fd(fd)) }
    }
}

impl Screen {
    /// Takes the terminal.
    ///
    /// # Errors
    /// Those of termios(3) and signalfd(2).
    pub(super) fn open() -> io::Result<Self> {
        // SAFETY: plain data; all calls get live values, and descriptors that are open.
        unsafe {
            let mut before = MaybeUninit::<libc::termios>::uninit();
            if libc::tcgetattr(libc::STDIN_FILENO, before.as_mut_ptr()) != 0 {
                return Err(io::Error::last_os_error());
            }
            let before = before.assume_init();
            let (mut set, mut mask): (libc::sigset_t, libc::sigset_t) = (zeroed(), zeroed());
            libc::sigemptyset(&raw mut set);
            for signal in [libc::SIGTERM, libc::SIGHUP, libc::SIGINT, libc::SIGWINCH] {
                libc::sigaddset(&raw mut set, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, &raw mut mask);
            let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            let signals = OwnedFd::from_raw_fd(fd);
            let mut raw = before;
            raw.c_lflag &= !(libc::ICANON | libc::ECHO | libc::ISIG);
            (raw.c_cc[libc::VMIN], raw.c_cc[libc::VTIME]) = (1, 0);
            if libc::tcsetattr(libc::STDIN_FILENO, libc::TCSADRAIN, &raw const raw) != 0 {
                return Err(io::Error::last_os_error());
            }
            let out = output()?;
            let mut screen = Self { before, out, signals, mask, ended: false };
            screen.write(ENTER)?;
            Ok(screen)
        }
    }

    /// Columns and rows.
    pub(super) fn size(&self) -> (usize, usize) {
        // SAFETY: plain data, and a live value of the type that the call writes.
        let size = unsafe {
            let mut size: libc::winsize = zeroed();
            let done = libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &raw mut size);
            (done == 0).then_some((usize::from(size.ws_col), usize::from(size.ws_row)))
        };
        size.filter(|(columns, rows)| *columns > 0 && *rows > 0).unwrap_or(SIZE)
    }

    /// Shows lines, each no longer than the terminal is wide, and one at its bottom. `Key::End` as of [`key`](Self::key).
    ///
    /// # Errors
    /// Those of write(2).
    pub(super) fn show<'a>(
        &mut self,
        lines: impl Iterator<Item = &'a str>,
        footer: &str,
    ) -> io::Result<Key> {
        let (columns, rows) = self.size();
        let mut out = String::from("\x1b[H");
        for line in lines {
            out.push_str(line);
            // The rest of the line is of an earlier picture.
            out.push_str("\x1b[K\n");
        }
        let footer = crate::look::cut(footer, columns);
        out.push_str(&format!("\x1b[J\x1b[{rows};1H\x1b[7m{footer}\x1b[0m\x1b[K"));
        self.write(out.as_bytes())
    }

    /// Writes all. While the terminal takes no output, it looks for the wish to end: then `Key::End`, else `Key::None`.
    fn write(&mut self, bytes: &[u8]) -> io::Result<Key> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let mut set = [
                entry(self.out.as_raw_fd(), libc::POLLOUT),
                entry(self.signals.as_raw_fd(), libc::POLLIN),
                entry(libc::STDIN_FILENO, libc::POLLIN),
            ];
            poll(&mut set, None)?;
            let written = if set[0].revents != 0 { self.write_piece(rest)? } else { 0 };
            rest = &rest[written..];
            if written == 0
                && set[1..].iter().any(|entry| entry.revents != 0)
                && self.key(Duration::ZERO)? == Key::End
            {
                self.ended = true;
                return Ok(Key::End);
            }
            if written == 0 && set[0].revents != 0 {
                // There is some room, and too little.
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        Ok(Key::None)
    }

    /// Writes what there is room for. The number of bytes.
    fn write_piece(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.out.write(&bytes[..bytes.len().min(PIECE)]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            done => done,
        }
    }

    /// Waits for a key.
    ///
    /// # Errors
    /// Those of poll(2).
    pub(super) fn key(&mut self, within: Duration) -> io::Result<Key> {
        if self.ended {
            return Ok(Key::End);
        }
        let mut set = [
            entry(libc::STDIN_FILENO, libc::POLLIN),
            entry(self.signals.as_raw_fd(), libc::POLLIN),
        ];
        match poll(&mut set, Some(within))? {
            None => return Ok(Key::Other),
            Some(0) => return Ok(Key::None),
            Some(_) => {}
        }
        if set[1].revents != 0 {
            // SAFETY: plain data, and a live value of its size.
            let signal = unsafe {
                let mut info: libc::signalfd_siginfo = zeroed();
                libc::read(set[1].fd, (&raw mut info).cast(), size_of_val(&info));
                info.ssi_signo
            };
            return Ok(if signal == libc::SIGWINCH as u32 { Key::Other } else { Key::End });
        }
        let mut bytes = [0u8; 64];
        // SAFETY: live bytes, and their number.
        let n = unsafe { libc::read(libc::STDIN_FILENO, bytes.as_mut_ptr().cast(), bytes.len()) };
        // The terminal is gone.
        if n <= 0 {
            return Ok(Key::End);
        }
        Ok(self.meaning(&bytes[..n as usize]))
    }

    fn meaning(&self, bytes: &[u8]) -> Key {
        let page = self.size().1.saturating_sub(2).max(1);
        match bytes {
            b"q" | b"Q" | b"\x03" | b"\x04" => Key::End,
            b"\x1b[A" | b"\x1bOA" | b"k" => Key::Up(1),
            b"\x1b[B" | b"\x1bOB" | b"j" => Key::Down(1),
            b"\x1b[5~" => Key::Up(page),
            b"\x1b[6~" | b" " => Key::Down(page),
            bytes if bytes.contains(&b'q') && !bytes.contains(&0x1b) => Key::End,
            _ => Key::Other,
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let mut rest = LEAVE;
        while !rest.is_empty() {
            let mut set = [entry(self.out.as_raw_fd(), libc::POLLOUT)];
            if !matches!(poll(&mut set, Some(LAST_WAIT)), Ok(Some(1..))) {
                break;
            }
            match self.write_piece(rest) {
                Ok(n) => rest = &rest[n..],
                Err(_) => break,
            }
        }
        // SAFETY: values that the calls above have filled.
        unsafe {
            // It does not wait for a terminal that takes no output.
            libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, &raw const self.before);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.mask, std::ptr::null_mut());
        }
    }
}
