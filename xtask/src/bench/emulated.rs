//! The curve of the kernel's Soft-RoCE: two guests on a bridge, with the programs that measure the device. Its place is
//! in the guests, since this machine's kernel need not have the module. They are emulated where it has no KVM either.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;

use super::contender::{Contender, PORT, Verb, latency, stream_of};
use super::readings::Column;
use super::sweep::{Curve, Quantity};
use crate::conformance::{Family, Guest};
use crate::interrupt;

/// The name of the curve.
const NAME: &str = "rxe WRITE (emulated)";
/// The exponent of the ACK timeout: 1 s. Emulated processors are too slow for perftest's 67 ms.
const ACK_TIMEOUT: &str = "-u 18";
const TIME_LIMIT: Duration = Duration::from_secs(120);
/// Time for a server to listen.
const SOON: Duration = Duration::from_secs(30);

/// Two guests that run.
pub(super) struct Guests {
    server: Guest,
    client: Guest,
}

impl Guests {
    /// The inner error is why there are none to be had.
    pub(super) fn start(scratch: &Path) -> anyhow::Result<Result<Self, String>> {
        let log = scratch.join("guest.log");
        let server = match Guest::start(1, &log)? {
            Ok(guest) => guest,
            Err(reason) => return Ok(Err(reason)),
        };
        Ok(Guest::start(2, &log)?.map(|client| Guests { server, client }))
    }

    /// A curve of WRITEs of these sizes, which grow. It ends at the first size that fails: what the guests do behind that says
    /// nothing.
    pub(super) fn curve(
        &self,
        quantity: Quantity,
        sizes: impl Iterator<Item = u64>,
    ) -> anyhow::Result<Curve> {
        let mut curve =
            Curve { name: NAME.into(), ours: false, points: Vec::new(), failures: Vec::new() };
        for size in sizes {
            eprint!(" .");
            let figure = self.measure(&contender(quantity, size));
            interrupt::check()?;
            match figure {
                Ok(figure) => curve.points.push((size, figure)),
                Err(error) => {
                    curve.failures.push((size, format!("{error:#}")));
                    break;
                }
            }
        }
        Ok(curve)
    }

    fn measure(&self, contender: &Contender) -> anyhow::Result<f64> {
        let words = |guest: &Guest, words: &str| {
            let index = guest.gid_index(Family::Ipv4).context("the guest has no GID")?;
            let address = self.server.address(Family::Ipv4);
            Ok::<_, anyhow::Error>(
                format!("{words} {ACK_TIMEOUT} -x {index}").replace("ADDRESS", &address),
            )
        };
        let server = contender.server.as_deref().context("the program has no server")?;
        let _server = self.server.spawn(&words(&self.server, server)?)?;
        self.server.wait_for_listener(PORT, SOON)?;
        let output = self.client.run(&words(&self.client, &contender.client)?, TIME_LIMIT)?;
        contender.reading.read(&output).with_context(|| format!("no figure in\n{output}"))
    }
}

/// Fewer messages than of others: each takes about a thousand times as long.
fn contender(quantity: Quantity, size: u64) -> Contender {
    match quantity {
        Quantity::Latency => {
            latency(Verb::Write, size, ((4 << 20) / size).clamp(10, 100), "", Column::Latency)
        }
        Quantity::Bandwidth => stream_of(Verb::Write, size, ((4 << 20) / size).clamp(20, 1000)),
    }
}
