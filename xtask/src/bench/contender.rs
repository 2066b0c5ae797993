//! The programs that are measured: ours and the peers, as Debian has them.

use super::readings::{Column, Reading, Ucx};
use crate::conformance::Side;

/// A program, or a pair of them, and how its figure is read.
///
/// In command lines `ADDRESS` stands for the server's address, `LIMITS` for our program of that name, `PROGRAMS/` for
/// the folder of the compiled C programs and `SHARED_FILE` for a file in memory.
#[derive(Debug, Clone)]
pub(super) struct Contender {
    pub(super) name: &'static str,
    /// Whether it runs on the device.
    pub(super) device: bool,
    /// Whether its sockets are rsockets.
    pub(super) sockets: bool,
    pub(super) environment: &'static [(&'static str, &'static str)],
    /// None: the client is the only program.
    pub(super) server: Option<String>,
    pub(super) client: String,
    /// The side that prints the figure.
    pub(super) printer: Side,
    pub(super) reading: Reading,
    /// The factor from the printed figure to this unit.
    pub(super) scale: f64,
}

/// The port of every server: each run has hosts of its own.
pub(super) const PORT: u16 = 20_500;

/// The units of figures.
pub(super) const GBITS: &str = "Gb/s";
pub(super) const RATE: &str = "M/s";
pub(super) const MICROSECONDS: &str = "us";

/// The verb that a perftest program measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Send,
    Write,
    Read,
}

impl Verb {
    fn program(self, kind: &str) -> String {
        let verb = match self {
            Self::Send => "send",
            Self::Write => "write",
            Self::Read => "read",
        };
        format!("ib_{verb}_{kind}")
    }
}

impl Contender {
    fn pair(name: &'static str, server: String, client: String, reading: Reading) -> Self {
        Contender {
            name,
            device: false,
            sockets: false,
            environment: &[],
            server: Some(server),
            client,
            printer: Side::Client,
            reading,
            scale: 1.0,
        }
    }

    pub(super) fn alone(name: &'static str, client: String, reading: Reading) -> Self {
        Contender { server: None, ..Self::pair(name, String::new(), client, reading) }
    }

    pub(super) fn with_environment(
        self,
        environment: &'static [(&'static str, &'static str)],
    ) -> Self {
        Contender { environment, ..self }
    }

    /// The server's figure. With services that may lose messages, the client's only counts those sent.
    pub(super) fn received(self) -> Self {
        Contender { printer: Side::Server, ..self }
    }

    /// A program of sockets on the device.
    pub(super) fn on_rsockets(self, name: &'static str) -> Self {
        Contender { name, device: true, sockets: true, ..self }
    }

    /// A program on the device.
    pub(super) fn on_device(self) -> Self {
        Contender { device: true, ..self }
    }

    pub(super) fn scaled(self, scale: f64) -> Self {
        Contender { scale, ..self }
    }

    fn perftest(command: &str, column: Column) -> Self {
        let server = format!("{command} -p {PORT}");
        let client = format!("{server} ADDRESS");
        Self::pair("anyverbs", server, client, Reading::Perftest(column)).on_device()
    }
}

/// perftest for a time, Gb/s or millions of messages a second.
pub(super) fn stream(verb: Verb, seconds: u32, options: &str, column: Column) -> Contender {
    let program = verb.program("bw");
    Contender::perftest(&format!("{program} -D {seconds} --report_gbits {options}"), column)
}

/// WRITEs to memory that the target shares: perftest's server has a file in memory for its buffer.
pub(super) fn write_to_shared(seconds: u32, size: u64) -> Contender {
    let client = stream(Verb::Write, seconds, &format!("-s {size}"), Column::Gbits);
    let server = client.server.map(|server| format!("{server} --mmap=SHARED_FILE"));
    Contender { server, ..client }
}

/// perftest for a number of messages, Gb/s.
pub(super) fn stream_of(verb: Verb, size: u64, count: u64) -> Contender {
    let program = verb.program("bw");
    Contender::perftest(&format!("{program} -n {count} -s {size} --report_gbits"), Column::Gbits)
}

/// perftest's time of a message of `size` bytes, microseconds.
pub(super) fn latency(
    verb: Verb,
    size: u64,
    count: u64,
    options: &str,
    column: Column,
) -> Contender {
    let program = verb.program("lat");
    Contender::perftest(&format!("{program} -s {size} -n {count} {options}"), column)
}

/// One stream of TCP.
pub(super) fn tcp(seconds: u32, options: &str) -> Contender {
    Contender::pair(
        "TCP (iperf3)",
        format!("iperf3 -s -1 -p {PORT}"),
        format!("iperf3 -f m -t {seconds} -p {PORT} {options} -c ADDRESS"),
        Reading::Iperf3Gbits,
    )
}

/// Latency by qperf: `tcp_lat` or `udp_lat`.
pub(super) fn qperf_latency(name: &'static str, test: &str, size: u64) -> Contender {
    Contender::pair(
        name,
        format!("qperf -lp {PORT}"),
        format!("qperf ADDRESS -lp {PORT} -t 1 -uu -oo msg_size:{size} {test} quit"),
        Reading::QperfLatency,
    )
}

/// Bandwidth of TCP by qperf.
pub(super) fn qperf_bandwidth(size: u64) -> Contender {
    Contender::pair(
        "TCP (qperf)",
        format!("qperf -lp {PORT}"),
        format!("qperf ADDRESS -lp {PORT} -t 1 -uu -oo msg_size:{size} tcp_bw quit"),
        Reading::QperfGbits,
    )
}

/// The path between two UCX processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UcxOver {
    SharedMemory,
    Tcp,
}

/// UCX's own benchmark.
pub(super) fn ucx(over: UcxOver, test: &str, size: u64, count: u64, column: Ucx) -> Contender {
    let (name, environment): (_, &[_]) = match over {
        UcxOver::SharedMemory => ("UCX", &[("UCX_TLS", "posix,cma,self")]),
        UcxOver::Tcp => ("UCX (TCP)", &[("UCX_TLS", "tcp,self"), ("UCX_NET_DEVICES", "eth0")]),
    };
    Contender::pair(
        name,
        format!("ucx_perftest -p {PORT}"),
        format!("ucx_perftest ADDRESS -p {PORT} -t {test} -s {size} -n {count} -f -v"),
        Reading::Ucx(column),
    )
    .with_environment(environment)
}

/// libfabric's ping-pong; `shm` has reliable datagrams, `tcp` connections.
pub(super) fn fabric(provider: &str, size: u64, count: u64) -> Contender {
    let (name, endpoint) = match provider {
        "shm" => ("libfabric", "rdm"),
        _ => ("libfabric (TCP)", "msg"),
    };
    let command = format!("fi_pingpong -p {provider} -e {endpoint} -S {size} -I {count}");
    Contender::pair(
        name,
        format!("{command} -B {PORT}"),
        format!("{command} -P {PORT} ADDRESS"),
        Reading::FabricLatency,
    )
}

/// Our own bare UDP ping-pong, spinning or (`--block`) blocking.
pub(super) fn udp_latency(name: &'static str, options: &str) -> Contender {
    let command = format!("LIMITS udp-latency {options}");
    Contender::pair(
        name,
        format!("{command} server 0.0.0.0:{PORT}"),
        format!("{command} client ADDRESS:{PORT}"),
        Reading::Number,
    )
}

/// Our own bare UDP stream with the offloads that the place has. The figure counts datagrams that arrive.
pub(super) fn udp_stream(seconds: u32, segment: u32) -> Contender {
    let command = format!("LIMITS udp-stream --segment {segment} --seconds {seconds}");
    let contender = Contender::pair(
        "bare UDP",
        format!("{command} server 0.0.0.0:{PORT}"),
        format!("{command} client ADDRESS:{PORT}"),
        Reading::Number,
    );
    contender.received()
}

/// One `process_vm_writev` or `process_vm_readv` a message: microseconds or Gb/s.
pub(super) fn copy(direction: &str, figure: &str, size: u64) -> Contender {
    let name = if direction == "write" { "process_vm_writev" } else { "process_vm_readv" };
    let client = format!("LIMITS copy {direction} {figure} --size {size} --seconds 0.5");
    Contender::alone(name, client, Reading::Number)
}

/// A ring in shared memory with nothing but flags and two copies; it takes both processors itself.
pub(super) fn bare_ring(size: u64) -> Contender {
    let client = format!("LIMITS memory --size {size} --seconds 0.5");
    Contender::alone("bare ring", client, Reading::Number)
}

/// `rstream` on the device, or with `-T s` over the kernel's sockets.
pub(super) fn rstream(name: &'static str, options: &str) -> Contender {
    let command = format!("rstream -S 1048576 -C 1000 {options} -p {PORT}");
    let server = format!("{command} -b ADDRESS");
    Contender::pair(name, server, format!("{command} -s ADDRESS"), Reading::RstreamGbits)
}

/// Connections a second.
pub(super) fn cmtime() -> Contender {
    Contender::pair(
        "anyverbs",
        format!("cmtime -b ADDRESS -p {PORT}"),
        format!("cmtime -c 1000 -s ADDRESS -p {PORT}"),
        Reading::Cmtime,
    )
    .on_device()
}

/// Messages. The other end checks their data.
pub(super) fn checked() -> Contender {
    let command = format!("ibv_rc_pingpong -g 0 -c -s 65536 -n 300 -p {PORT}");
    let client = format!("{command} ADDRESS");
    Contender::pair("anyverbs", command, client, Reading::Pingpong).on_device()
}
