//! Reads a program's figure from its output. Zero or text is not a figure.

use crate::conformance::{cmtime_connects, iperf3_gbits, transfers};

/// The place of the figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reading {
    /// A column of perftest's table.
    Perftest(Column),
    Iperf3Gbits,
    /// A column of `ucx_perftest -f -v`.
    Ucx(Ucx),
    /// Output of `qperf`: microseconds one way.
    QperfLatency,
    QperfGbits,
    /// Output of `fi_pingpong`: microseconds one way.
    FabricLatency,
    /// Output of `rstream`: the last row.
    RstreamGbits,
    /// Connections a second.
    Cmtime,
    /// Output of `ibv_rc_pingpong`: Gb/s, and the data was right.
    Pingpong,
    /// The only number, of our own `limits`.
    Number,
    /// A line `name number`, of our own programs.
    Named(&'static str),
}

/// A column of perftest's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Column {
    /// Average, with `--report_gbits`.
    Gbits,
    /// Millions of messages a second.
    Rate,
    /// Typical time of `*_lat`, microseconds.
    Latency,
    /// Its 99.9th percentile.
    Slowest,
}

/// A column of UCX's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ucx {
    /// The median, microseconds.
    Latency,
    Gbits,
    /// Millions of messages a second.
    Rate,
}

impl Reading {
    /// The figure in `output`.
    pub(super) fn read(self, output: &str) -> Option<f64> {
        let figure = match self {
            Self::Perftest(column) => perftest(output, column),
            Self::Iperf3Gbits => iperf3_gbits(output),
            Self::Ucx(column) => ucx(output, column),
            Self::QperfLatency => qperf(output, "latency", &TIMES).map(|s| s * 1e6),
            Self::QperfGbits => qperf(output, "bw", &RATES).map(|bytes| bytes * 8.0 / 1e9),
            Self::FabricLatency => fabric(output),
            Self::RstreamGbits => transfers(output).last().map(|row| row.gbits),
            Self::Cmtime => cmtime_connects(output).ok().map(|us| 1e6 / us),
            Self::Pingpong => pingpong(output),
            Self::Number => output.trim().parse().ok(),
            Self::Named(name) => {
                output.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
            }
        };
        // Zero is a figure for costs, but not for amounts moved.
        let zero_counts = matches!(self, Self::Named(_));
        figure.filter(|value: &f64| value.is_finite() && (*value > 0.0 || zero_counts))
    }
}

fn perftest(output: &str, column: Column) -> Option<f64> {
    let mut lines = output.lines().skip_while(|line| !line.trim_start().starts_with("#bytes"));
    let header = lines.next()?;
    let (title, at) = match column {
        Column::Gbits => ("BW average[Gb/sec]", 3),
        Column::Rate => ("MsgRate[Mpps]", 4),
        Column::Latency => ("t_typical[usec]", 4),
        Column::Slowest => ("99.9% percentile[usec]", 8),
    };
    header.contains(title).then_some(())?;
    // A warning may stand in the table.
    let rows = lines.take_while(|line| !line.starts_with("---")).filter_map(numbers);
    rows.filter(|row| row.len() >= 3).last()?.get(at).copied()
}

fn numbers(line: &str) -> Option<Vec<f64>> {
    line.split_ascii_whitespace().map(|word| word.parse().ok()).collect()
}

fn ucx(output: &str, column: Ucx) -> Option<f64> {
    let mut lines = output.lines().skip_while(|line| !line.starts_with("iterations,"));
    let header = lines.next()?;
    let row = lines.next()?;
    let value = |title: &str| {
        let at = header.split(',').position(|name| name == title)?;
        row.split(',').nth(at)?.parse::<f64>().ok()
    };
    match column {
        Ucx::Latency => value("50.0_percentile_lat"),
        // Its MB are MiB.
        Ucx::Gbits => value("overall_bw").map(|mib| mib * 8.0 * f64::from(1 << 20) / 1e9),
        Ucx::Rate => value("overall_mr").map(|rate| rate / 1e6),
    }
}

type Units = [(&'static str, f64); 4];
const TIMES: Units = [("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("sec", 1.0)];
const RATES: Units = [("bytes/sec", 1.0), ("KB/sec", 1e3), ("MB/sec", 1e6), ("GB/sec", 1e9)];

fn qperf(output: &str, name: &str, units: &Units) -> Option<f64> {
    let line = output.lines().find(|line| line.trim_start().starts_with(name))?;
    let (_, figure) = line.split_once('=')?;
    let (number, unit) = figure.trim().split_once(' ')?;
    let (_, scale) = units.iter().find(|(name, _)| *name == unit.trim())?;
    Some(number.replace(',', "").parse::<f64>().ok()? * scale)
}

fn fabric(output: &str) -> Option<f64> {
    let mut lines = output.lines().skip_while(|line| !line.starts_with("bytes "));
    let at = lines.next()?.split_ascii_whitespace().position(|name| name == "usec/xfer")?;
    lines.next()?.split_ascii_whitespace().nth(at)?.parse().ok()
}

fn pingpong(output: &str) -> Option<f64> {
    if output.contains("invalid data") {
        return None;
    }
    let line = output.lines().find(|line| line.ends_with(" Mbit/sec"))?;
    let (_, figure) = line.rsplit_once(" = ")?;
    Some(figure.split(' ').next()?.parse::<f64>().ok()? / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(value: Option<f64>, wanted: f64) -> bool {
        value.is_some_and(|value| (value / wanted - 1.0).abs() < 1e-6)
    }

    #[test]
    fn perftests_columns() {
        let latency = "\
 local address: LID 0x8001 QPN 0x353d96 PSN 0x1596a5
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] 
Conflicting CPU frequency values detected: 2596.096 != 2595.124. CPU Frequency is not max.
 2       20000          1.30           64332.77      2.00     	       23.15       	224.81 		295.39  		3341.31
---------------------------------------------------------------------------------------
";
        assert_eq!(Reading::Perftest(Column::Latency).read(latency), Some(2.0));
        assert_eq!(Reading::Perftest(Column::Slowest).read(latency), Some(3341.31));
        assert_eq!(Reading::Perftest(Column::Gbits).read(latency), None);
        let bandwidth =
            " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 8          528688           0.000000            0.033834            0.528662
---------------------------------------------------------------------------------------
";
        assert_eq!(Reading::Perftest(Column::Gbits).read(bandwidth), Some(0.033834));
        assert_eq!(Reading::Perftest(Column::Rate).read(bandwidth), Some(0.528662));
        let header = bandwidth.lines().next().unwrap();
        assert_eq!(Reading::Perftest(Column::Rate).read(header), None);
        let nothing = bandwidth.replace("0.528662", "0.000000");
        assert_eq!(Reading::Perftest(Column::Rate).read(&nothing), None);
    }

    #[test]
    fn ucxs_columns() {
        let said = "\
[1795276431.102934] [vm:2376 :0] perftest.c:100  UCX  WARN  CPU affinity is not set
iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
500000,0.041,1.337,1.337,5.70,5.71,747734,747735
";
        assert_eq!(Reading::Ucx(Ucx::Latency).read(said), Some(0.041));
        assert!(close(Reading::Ucx(Ucx::Gbits).read(said), 5.71 * 1.048576 * 8e-3));
        assert!(close(Reading::Ucx(Ucx::Rate).read(said), 0.747735));
        let failed = "[1795276431.102934] [vm:2376 :0] perftest_params.c:434  UCX  ERROR missing test name\n";
        assert_eq!(Reading::Ucx(Ucx::Latency).read(failed), None);
    }

    #[test]
    fn qperfs_lines() {
        let latency = "tcp_lat:\n    latency  =  52,626 ns\nquit:\n";
        assert!(close(Reading::QperfLatency.read(latency), 52.626));
        assert!(close(Reading::QperfGbits.read("tcp_bw:\n    bw  =  299 MB/sec\nquit:\n"), 2.392));
        assert!(close(Reading::QperfGbits.read("tcp_bw:\n    bw  =  3.1 GB/sec\n"), 24.8));
        // Its output for datagrams that are too long.
        assert_eq!(Reading::QperfLatency.read("udp_lat:\n    latency  =  0 ns\nquit:\n"), None);
        assert_eq!(Reading::QperfLatency.read("tcp_lat:\n10.77.0.1: failed to connect\n"), None);
    }

    #[test]
    fn libfabrics_table() {
        let said = "\
bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec
2       10k     =10k     39k         0.53s      0.07      26.74       0.04
";
        assert_eq!(Reading::FabricLatency.read(said), Some(26.74));
        let failed =
            "[error] util/pingpong.c:568 : ctrl/read: no data or remote connection closed\n";
        assert_eq!(Reading::FabricLatency.read(failed), None);
    }

    #[test]
    fn our_own_programs() {
        assert_eq!(Reading::Number.read("53.4\n"), Some(53.4));
        assert_eq!(Reading::Number.read("Error: cannot copy\n"), None);
        let said = "engine_kib 7000\nidle_cpu_percent 0.0000\n";
        assert_eq!(Reading::Named("engine_kib").read(said), Some(7000.0));
        assert_eq!(Reading::Named("idle_cpu_percent").read(said), Some(0.0));
        assert_eq!(Reading::Named("qp_bytes").read(said), None);
    }

    #[test]
    fn pingpongs_check_what_they_get() {
        let good = "65536000 bytes in 0.05 seconds = 9862.29 Mbit/sec\n500 iters in 0.05 seconds = 106.30 usec/iter\n";
        assert!(close(Reading::Pingpong.read(good), 9.86229));
        assert_eq!(Reading::Pingpong.read(&format!("{good}invalid data in page 3\n")), None);
    }
}
