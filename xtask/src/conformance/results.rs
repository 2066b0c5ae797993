//! The output of tools that have really done their work.

use serde::Deserialize;

/// The form of a tool's report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Report {
    /// `ibv_*_pingpong`: two lines on each side.
    Pingpong,
    /// perftest: a table on the client's side.
    Perftest,
    /// qperf: `name = value unit` lines on the client's side.
    Qperf,
    /// `rstream`, `riostream`: a table on both sides.
    Rstream,
    /// `udpong`: the same on the client's side.
    Udpong,
    /// `cmtime`: a table of steps on the client's side.
    Cmtime,
    /// iperf3: the receiver's total on the client's side.
    Iperf3,
    /// `exchange`: its operations, on both sides.
    Exchange,
    /// The exit status tells everything: the program checks its own work.
    Status,
    /// Only the exit status and the `prints` of the table.
    None,
}

impl Report {
    /// Whether the server's side prints the same.
    pub(crate) fn on_both_sides(self) -> bool {
        matches!(self, Report::Pingpong | Report::Rstream | Report::Exchange)
    }

    /// The figures in a few words, or the missing part. `rows` is the number of lines that a table must have.
    pub(crate) fn read(self, output: &str, rows: usize) -> Result<String, String> {
        match self {
            Report::Pingpong => pingpong(output),
            Report::Perftest => perftest(output, rows),
            Report::Qperf => qperf(output),
            Report::Rstream | Report::Udpong => rstream(output, rows),
            Report::Cmtime => cmtime(output),
            Report::Iperf3 => iperf3_gbits(output)
                .filter(|gbits| *gbits > 0.0)
                .map(|gbits| format!("{gbits:.2} Gb/s"))
                .ok_or("no total of the receiver".into()),
            Report::Exchange => exchange(output),
            Report::Status | Report::None => Ok(String::new()),
        }
    }

    /// As [`read`](Self::read), for a program whose clock cannot be relied on. Perftest's speeds, which it takes from
    /// the processor's cycles, are not looked at.
    pub(crate) fn read_untimed(self, output: &str, rows: usize) -> Result<String, String> {
        match self {
            Report::Perftest => perftest_table(output, rows).map(|(_, table)| {
                let counts = table.iter().map(|row| format!("{} of {} B", row[1], row[0]));
                counts.collect::<Vec<_>>().join(", ")
            }),
            _ => self.read(output, rows),
        }
    }
}

fn pingpong(output: &str) -> Result<String, String> {
    let line = |what: &str| {
        output.lines().find(|line| line.contains(what)).ok_or(format!("no line with {what:?}"))
    };
    line(" bytes in ")?;
    let iterations = line(" iters in ")?;
    if output.contains("invalid data in page") {
        return Err("the tool found wrong data".into());
    }
    let figure =
        iterations.rsplit_once(" = ").map(|(_, figure)| figure).ok_or("no time per iteration")?;
    match figure.split_once(' ') {
        Some((number, _)) if number.parse::<f64>().is_ok_and(|time| time > 0.0) => {
            Ok(figure.trim().to_owned())
        }
        _ => Err(format!("not a time: {figure:?}")),
    }
}

fn perftest(output: &str, rows: usize) -> Result<String, String> {
    perftest_figure(output, rows)
        .map(|figure| format!("{} B: {} {}", figure.size, figure.value, figure.unit))
}

/// The last row of perftest's table.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Figure {
    size: f64,
    /// Average bandwidth, or typical latency.
    value: f64,
    unit: &'static str,
}

/// perftest's table, which must have at least `rows` rows, each of some iterations: its header, and the numbers of each row.
fn perftest_table(output: &str, rows: usize) -> Result<(&str, Vec<Vec<f64>>), String> {
    let mut lines = output.lines().skip_while(|line| !line.trim_start().starts_with("#bytes"));
    let header = lines.next().ok_or("no table of results")?;
    let table: Vec<Vec<f64>> = lines
        .map_while(|line| {
            // A long test may warn in the middle of its table.
            let numbers: Vec<_> = line.split_ascii_whitespace().map(str::parse::<f64>).collect();
            (!line.starts_with("---")).then_some(numbers)
        })
        .filter_map(|numbers| numbers.into_iter().collect::<Result<Vec<_>, _>>().ok())
        .filter(|numbers| numbers.len() >= 3)
        .collect();
    if table.len() < rows.max(1) {
        return Err(format!("{} rows of results in place of {rows}", table.len()));
    }
    match table.iter().find(|row| row[0] <= 0.0 || row[1] <= 0.0) {
        Some(row) => Err(format!("a row without iterations: {row:?}")),
        None => Ok((header, table)),
    }
}

/// The last row of perftest's table. Each row must have results.
fn perftest_figure(output: &str, rows: usize) -> Result<Figure, String> {
    let (header, table) = perftest_table(output, rows)?;
    // The slowest of the figures may print as 0.00, but never all.
    if let Some(row) = table.iter().find(|row| !row[2..].iter().any(|figure| *figure > 0.0)) {
        return Err(format!("a row without results: {row:?}"));
    }
    let last = table.last().ok_or("an empty table of results")?;
    let bandwidth = header.contains("BW average");
    let (figure, unit) = if bandwidth {
        (last.get(3), if header.contains("Gb/sec") { "Gb/s" } else { "MiB/s" })
    } else if header.contains("t_typical") {
        (last.get(4), "us")
    } else {
        (last.get(2), "us")
    };
    let value = *figure.ok_or("a row that is too short")?;
    Ok(Figure { size: last[0], value, unit })
}

fn qperf(output: &str) -> Result<String, String> {
    let figures: Vec<&str> = output
        .lines()
        .filter_map(|line| {
            // A log line may have a `key=value`.
            let (_, figure) = line.split_once("  =  ")?;
            let number = figure.split_ascii_whitespace().next()?.replace(',', "");
            number.parse::<f64>().is_ok_and(|value| value > 0.0).then_some(line.trim())
        })
        .collect();
    if figures.is_empty() {
        Err("no figure above zero".into())
    } else {
        Ok(figures.join(", ").replace("  =  ", " = "))
    }
}

/// A row of the tables of `rstream`, `riostream` and `udpong`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Transfer<'a> {
    pub(crate) name: &'a str,
    pub(crate) gbits: f64,
    pub(crate) us_per_transfer: f64,
}

/// The rows `name bytes xfers [iters] total time Gb/sec usec/xfer`.
pub(crate) fn transfers(output: &str) -> Vec<Transfer<'_>> {
    let rows = output.lines().skip_while(|line| !line.starts_with("name "));
    rows.filter_map(|line| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        // The last three columns may have no space between them.
        let [name, .., time, gbits, us] = words[..] else { return None };
        time.ends_with('s').then_some(())?;
        Some(Transfer { name, gbits: gbits.parse().ok()?, us_per_transfer: us.parse().ok()? })
    })
    .collect()
}

fn rstream(output: &str, rows: usize) -> Result<String, String> {
    if output.contains("data verification failed") {
        return Err("the tool found wrong data".into());
    }
    let all = transfers(output);
    if all.len() < rows {
        return Err(format!("{} rows of results in place of {rows}", all.len()));
    }
    let last = all.last().ok_or("no results")?;
    Ok(format!("{}: {} Gb/s, {} us", last.name, last.gbits, last.us_per_transfer))
}

fn exchange(output: &str) -> Result<String, String> {
    let line = output.lines().find_map(|line| line.strip_prefix("all right: "));
    line.map(str::to_owned).ok_or("it does not say that all is right".into())
}

fn cmtime(output: &str) -> Result<String, String> {
    cmtime_connects(output).map(|us| format!("{us} us a connection"))
}

/// Microseconds a connection, of all of `cmtime`'s steps from address to established.
pub(crate) fn cmtime_connects(output: &str) -> Result<f64, String> {
    if let Some(event) = output.lines().find(|line| line.contains("event: RDMA_CM_EVENT")) {
        return Err(event.trim().into());
    }
    let mut sum = 0.0;
    for step in ["resolve addr", "resolve route", "create qp", "connect", "disconnect"] {
        let line = output
            .lines()
            .find(|line| line.split_once(':').is_some_and(|(name, _)| name.trim() == step))
            .ok_or(format!("no step {step:?}"))?;
        let figures: Vec<f64> =
            line.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [total, _, _, us] = figures[..] else {
            return Err(format!("not four figures: {line:?}"));
        };
        if total < 0.0 || us < 0.0 {
            return Err(format!("a step that did not happen: {line:?}"));
        }
        if step != "disconnect" {
            sum += us;
        }
    }
    Ok(sum)
}

/// The receiver's total.
pub(crate) fn iperf3_gbits(output: &str) -> Option<f64> {
    let line = output.lines().rev().find(|line| line.trim_end().ends_with("receiver"))?;
    let words: Vec<_> = line.split_ascii_whitespace().collect();
    let (at, scale) = words.iter().enumerate().find_map(|(at, word)| {
        let scale = match *word {
            "Kbits/sec" => 1e-6,
            "Mbits/sec" => 1e-3,
            "Gbits/sec" => 1.0,
            _ => return None,
        };
        Some((at, scale))
    })?;
    Some(words.get(at.checked_sub(1)?)?.parse::<f64>().ok()? * scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rstreams_table() {
        let said = "name      bytes   xfers   iters   total       time     Gb/sec    usec/xfer\n\
            Keepalive: ON\n  time: 30\n\
            64_lat    64      1       100k    12m         0.59s      0.17       2.97\n\
            custom    1000    10      1       19k         0.01s      0.01     563.25\n";
        let rows = transfers(said);
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0], Transfer { name: "64_lat", gbits: 0.17, us_per_transfer: 2.97 });
        assert_eq!(rstream(said, 2).unwrap(), "custom: 0.01 Gb/s, 563.25 us");
        assert!(rstream(said, 3).is_err());
        assert!(rstream("name      bytes\nrconnect: No such device\n", 1).is_err());
        let udpong = "name      bytes   xfers   total       time     Gb/sec    usec/xfer\n\
            custom    1000    20      19k         0.01s      0.01     563.25\n";
        assert!(rstream(udpong, 1).is_ok());
    }

    #[test]
    fn cmtimes_steps() {
        let said = "creating id\nconnecting\n\
            step              total ms     max ms     min us  us / conn\n\
            create id    :        1.00       0.14       4.00      10.00\n\
            resolve addr :       17.00      16.00   15505.00     170.00\n\
            resolve route:        7.35       5.98    5014.00      73.50\n\
            create qp    :       20.00       3.25      73.00     200.00\n\
            connect      :      116.94     109.80   14528.00    1169.50\n\
            disconnect   :       72.04      45.87    1679.00     720.36\n";
        assert_eq!(cmtime_connects(said).unwrap(), 1613.0);
        let failed = format!("event: RDMA_CM_EVENT_REJECTED, error: 28\n{said}");
        assert!(cmtime_connects(&failed).unwrap_err().contains("REJECTED"));
        assert!(cmtime_connects("creating id\n").is_err());
    }

    #[test]
    fn iperf3s_receiver() {
        let said = "[  5]   0.00-2.00   sec  5.9 GBytes  25300 Mbits/sec    0   sender\n\
                    [  5]   0.00-2.00   sec  5.8 GBytes  25.2 Gbits/sec        receiver\n\niperf Done.\n";
        assert_eq!(iperf3_gbits(said), Some(25.2));
        assert_eq!(iperf3_gbits(&said.replace("25.2 G", "25200 M")), Some(25.2));
        assert_eq!(iperf3_gbits("nothing"), None);
    }

    const BANDWIDTH: &str = "\
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 2          1000             7.62               7.55   \t\t   3.960000
Conflicting CPU frequency values detected: 1 != 2. CPU Frequency is not max.
 4          1000             15.1               15.0   \t\t   3.950000
---------------------------------------------------------------------------------------
 #9          1000             15.1               15.0   \t\t   3.950000
";

    #[test]
    fn perftest_tables() {
        assert_eq!(perftest(BANDWIDTH, 2).unwrap(), "4 B: 15 MiB/s");
        assert!(perftest(BANDWIDTH, 3).is_err());
        assert!(perftest("local address: ...\n", 1).is_err());
        assert!(
            perftest(
                " #bytes #iterations BW peak[MB/sec] BW average[MB/sec] MsgRate[Mpps]\n---\n",
                1
            )
            .is_err()
        );
        let zero = " #bytes #iterations BW peak[MB/sec] BW average[MB/sec] MsgRate[Mpps]\n 2 1000 0.00 0.00 0.000000\n";
        assert!(perftest(zero, 1).is_err());
        assert_eq!(Report::Perftest.read_untimed(zero, 1).unwrap(), "1000 of 2 B");
        assert!(Report::Perftest.read_untimed(zero, 2).is_err());
        assert!(Report::Perftest.read_untimed(&zero.replace("1000", "0"), 1).is_err());
        let latency = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] \n 2       1000          1.00           9.00         2.50     \t       2.60        \t0.1\t\t2.7 \t\t9.0   \n";
        assert_eq!(perftest(latency, 1).unwrap(), "2 B: 2.5 us");
        let duration = " #bytes        #iterations       t_avg[usec]    tps average\n 2             1000            2.50             200000.00\n";
        assert_eq!(perftest(duration, 1).unwrap(), "2 B: 2.5 us");
    }

    #[test]
    fn pingpong_lines() {
        let good = "8192000 bytes in 0.01 seconds = 9362.29 Mbit/sec\n1000 iters in 0.01 seconds = 7.00 usec/iter\n";
        assert_eq!(pingpong(good).unwrap(), "7.00 usec/iter");
        assert!(pingpong("8192000 bytes in 0.01 seconds = 9362.29 Mbit/sec\n").is_err());
        assert!(pingpong(&format!("{good}invalid data in page 3\n")).is_err());
        assert!(pingpong("").is_err());
    }

    #[test]
    fn qperf_figures() {
        assert_eq!(qperf("rc_bw:\n    bw  =  1.2 GB/sec\n").unwrap(), "bw = 1.2 GB/sec");
        assert!(qperf("rc_bw:\nfailed to find any InfiniBand devices\n").is_err());
        assert!(qperf("rc_bw:\n    bw  =  0 GB/sec\n").is_err());
        assert!(
            qperf("rc_bw:\n WARN protection domain 1 is not destroyed: in use by 1 MR\n").is_err()
        );
    }
}
