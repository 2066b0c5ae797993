//! The part of a tree that changes: counters, and what `rdma` asks for. The files are made when somebody wants them.
//!
//! The preload object asks for fresh files by a connection to a socket in the tree, before it opens one, and waits for a byte. So a launcher
//! does not look at processes that nobody asks about.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyverbs::watch::{Seen, Totals, Watcher};

use crate::device::Device;
use crate::{counters, view_netlink};

/// The socket that answers when the files are fresh. The view knows its name.
pub(crate) const SOCKET: &str = ".fresh";
/// Files that are not older than this are fresh, in milliseconds. A tool reads dozens of them at a time.
const FRESH: Duration = Duration::from_millis(100);
/// Longest wait for a process that does not answer, in milliseconds.
const PATIENCE: Duration = Duration::from_millis(150);

/// Makes the files of one tree fresh.
#[derive(Debug)]
pub(crate) struct Files {
    /// The directory with the classes.
    sys: PathBuf,
    /// The directory with the answers to netlink requests, if any.
    netlink: Option<PathBuf>,
    device: Device,
    watcher: Watcher,
    totals: Totals,
    last: Option<Instant>,
}

impl Files {
    pub(crate) fn new(sys: PathBuf, netlink: Option<PathBuf>, device: &Device) -> io::Result<Self> {
        Ok(Self {
            sys,
            netlink,
            watcher: Watcher::new(&device.registry, device.udp_port)?,
            totals: Totals::new(&device.registry, device.udp_port)?,
            device: device.clone(),
            last: None,
        })
    }

    /// Writes all files, unless they are fresh.
    pub(crate) fn refresh(&mut self) -> io::Result<()> {
        if self.last.is_some_and(|last| last.elapsed() < FRESH) {
            return Ok(());
        }
        let seen: Vec<Seen> = self.watcher.look(PATIENCE);
        let all: counters::Counters = self.totals.update(&seen).collect();
        let port = self.sys.join("class/infiniband").join(&self.device.name).join("ports/1");
        for (dir, files) in
            [("counters", counters::port(&all)), ("hw_counters", counters::hardware(&all))]
        {
            let dir = port.join(dir);
            fs::create_dir_all(&dir)?;
            for (name, value) in files {
                replace(&dir.join(name), format!("{value}\n").as_bytes())?;
            }
        }
        if let Some(dir) = &self.netlink {
            view_netlink::write_live(dir, &self.device, &all, &seen)?;
        }
        self.last = Some(Instant::now());
        Ok(())
    }
}

/// Writes a file anew: who reads it at the time sees the old one.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let fresh = path.with_extension("fresh");
    fs::write(&fresh, bytes)?;
    fs::rename(fresh, path)
}

/// Serves a tree until it is dropped.
#[derive(Debug)]
pub(crate) struct Service {
    /// None once it is dropped.
    files: Arc<Mutex<Option<Files>>>,
}

impl Service {
    /// Makes the files, and answers at the socket of `tree`.
    pub(crate) fn start(tree: &Path, mut files: Files) -> io::Result<Self> {
        files.refresh()?;
        let listener = UnixListener::bind(tree.join(SOCKET))?;
        let files = Arc::new(Mutex::new(Some(files)));
        let service = Self { files: Arc::clone(&files) };
        thread::Builder::new().name("anyverbs-fresh".into()).spawn(move || {
            for socket in listener.incoming().flatten() {
                let mut socket = socket;
                let mut files = files.lock().unwrap_or_else(PoisonError::into_inner);
                let Some(files) = &mut *files else { return };
                // Who asks reads the old files then.
                let _ = files.refresh();
                let _ = socket.write_all(b"1");
            }
        })?;
        Ok(service)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        *self.files.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
