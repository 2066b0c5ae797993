//! The terminal as a full screen: a few sequences that every terminal knows, and termios(3).

use std::io;
use std::mem::{MaybeUninit, zeroed};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::time::Duration;

use super::write_all;

/// Another screen, without a cursor.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l";
const LEAVE: &[u8] = b"\x1b[?25h\x1b[?1049l";
/// The terminal's size where it tells none.
const SIZE: (usize, usize) = (80, 24);

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
    /// Signals that would leave the terminal as it is now, and that of its size.
    signals: OwnedFd,
    mask: libc::sigset_t,
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
            let screen = Self { before, signals, mask };
            write_all(ENTER)?;
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

    /// Shows lines, each no longer than the terminal is wide, and one at its bottom.
    ///
    /// # Errors
    /// Those of write(2).
    pub(super) fn show<'a>(
        &mut self,
        lines: impl Iterator<Item = &'a str>,
        footer: &str,
    ) -> io::Result<()> {
        let (columns, rows) = self.size();
        let mut out = String::from("\x1b[H");
        for line in lines {
            out.push_str(line);
            // The rest of the line is of an earlier picture.
            out.push_str("\x1b[K\n");
        }
        let footer = crate::look::cut(footer, columns);
        out.push_str(&format!("\x1b[J\x1b[{rows};1H\x1b[7m{footer}\x1b[0m\x1b[K"));
        write_all(out.as_bytes())
    }

    /// Waits for a key.
    ///
    /// # Errors
    /// Those of poll(2).
    pub(super) fn key(&mut self, within: Duration) -> io::Result<Key> {
        let entry = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut set = [entry(libc::STDIN_FILENO), entry(self.signals.as_raw_fd())];
        let timeout = within.as_millis().min(60_000) as i32;
        // SAFETY: two live entries.
        let n = unsafe { libc::poll(set.as_mut_ptr(), 2, timeout) };
        if n < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted {
                Ok(Key::Other)
            } else {
                Err(error)
            };
        }
        if n == 0 {
            return Ok(Key::None);
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
        let _ = write_all(LEAVE);
        // SAFETY: values that the calls above have filled.
        unsafe {
            libc::tcsetattr(libc::STDIN_FILENO, libc::TCSADRAIN, &raw const self.before);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.mask, std::ptr::null_mut());
        }
    }
}
