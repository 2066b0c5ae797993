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
    /// They share the counters.
    devices: Vec<Device>,
    watcher: Watcher,
    totals: Totals,
    last: Option<Instant>,
}

impl Files {
    /// For the devices of a process, one at least.
    pub(crate) fn new(
        sys: PathBuf,
        netlink: Option<PathBuf>,
        devices: Vec<Device>,
    ) -> io::Result<Self> {
        let first = devices.first().ok_or(io::ErrorKind::NotFound)?;
        Ok(Self {
            sys,
            netlink,
            watcher: Watcher::new(&first.registry, first.udp_port)?,
            totals: Totals::new(&first.registry, first.udp_port)?,
            devices,
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
        let files = [("counters", counters::port(&all)), ("hw_counters", counters::hardware(&all))];
        for (device, index) in self.devices.iter().zip(0..) {
            let port = self.sys.join("class/infiniband").join(&device.name).join("ports/1");
            for (dir, files) in &files {
                let dir = port.join(dir);
                fs::create_dir_all(&dir)?;
                for (name, value) in files {
                    replace(&dir.join(name), format!("{value}\n").as_bytes())?;
                }
            }
            if let Some(dir) = &self.netlink {
                view_netlink::write_live(dir, (device, index), &all, &seen)?;
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_device_has_its_answers() {
        let tree = std::env::temp_dir().join(format!("anyverbs-live-{}", std::process::id()));
        let registry = format!("anyverbs-live-{}", std::process::id());
        let devices = ["rail0", "rail1"].map(|name| Device {
            name: name.into(),
            registry: registry.clone(),
            ..crate::device::example()
        });
        let netlink = tree.join("netlink");
        let mut files =
            Files::new(tree.join("sys"), Some(netlink.clone()), devices.into()).unwrap();
        files.refresh().unwrap();
        for (name, index) in [("rail0", 0u8), ("rail1", 1)] {
            for command in [9, 10, 12, 17] {
                let answer = fs::read(netlink.join(format!("{index}/c{command}"))).unwrap();
                assert_eq!(answer[8], index, "{name}, command {command}");
                assert!(answer.windows(5).any(|text| text == name.as_bytes()));
            }
            let port = tree.join("sys/class/infiniband").join(name).join("ports/1");
            assert!(port.join("hw_counters/sent_pkts").exists());
        }
        fs::remove_dir_all(tree).unwrap();
    }
}
