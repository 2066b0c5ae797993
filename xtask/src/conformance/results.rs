//! What the tools print when they have really done something.

use serde::Deserialize;

/// How a tool reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Report {
    /// `ibv_*_pingpong`: two lines on each side.
    Pingpong,
    /// perftest: a table on the client's side.
    Perftest,
    /// qperf: `name = value unit` lines on the client's side.
    Qperf,
    /// Only the exit status and the `prints` of the table.
    None,
}

impl Report {
    /// Whether the server's side prints the same.
    pub(crate) fn on_both_sides(self) -> bool {
        self == Report::Pingpong
    }

    /// The figures in a few words, or what is missing. `rows` is how many lines perftest's table must have.
    pub(crate) fn read(self, output: &str, rows: usize) -> Result<String, String> {
        match self {
            Report::Pingpong => pingpong(output),
            Report::Perftest => perftest(output, rows),
            Report::Qperf => qperf(output),
            Report::None => Ok(String::new()),
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
pub(crate) struct Figure {
    pub(crate) size: f64,
    /// Average bandwidth, or typical latency.
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
}

/// Reads perftest's table, which must have at least `rows` rows, each with results.
pub(crate) fn perftest_figure(output: &str, rows: usize) -> Result<Figure, String> {
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
    if table.len() < rows {
        return Err(format!("{} rows of results in place of {rows}", table.len()));
    }
    for row in &table {
        // Size and iterations, then figures, of which the slowest may print as 0.00 but never all.
        if row[0] <= 0.0 || row[1] <= 0.0 || !row[2..].iter().any(|figure| *figure > 0.0) {
            return Err(format!("a row without results: {row:?}"));
        }
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

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(qperf("rc_bw:\n WARN PD not destroyed: in use by 1 MR pd=1\n").is_err());
    }
}
