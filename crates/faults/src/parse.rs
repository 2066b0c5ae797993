//! Reads scripts.

use std::time::Duration;

use thiserror::Error;

use crate::names::{self, Errno, PortEvent, Status};
use crate::words::{Words, chance, number, qp_name, rate, seed, time};
use crate::{
    CallAction, Fault, Fired, Limit, MOST_WAITING, Opcode, PacketAction, PacketKind, Place,
    ProcessAction, QpFailure, Rule, Script, Site, Span, Which, WorkAction,
};

/// A place in a script that cannot be understood.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}, column {column}: {reason}")]
pub struct ScriptError {
    /// Its line, from 1.
    pub line: u32,
    /// The character in it, from 1.
    pub column: u32,
    /// The mistake.
    pub reason: String,
}

const A_TIME: &str = "a time such as 10ms, 0.5s or 200us";
/// No GID table has more places.
const MOST_GIDS: usize = 256;

const A_NUMBER: &str = "a number from 1 on";
const A_FAULT: &str = "a fault: drop, duplicate, reorder, corrupt, delay, limit, mark, rnr, send, receive, page, region, down, gid, event, fatal, removed, fails, goes, process, or the name of a call";

/// Words that users know from elsewhere, and what to write.
const HINTS: [(&str, &str); 2] = [
    ("lid", "a LID changes for the program alone: write \"event LID_CHANGE\" and a time"),
    (
        "memory",
        "write \"regions vanish\", \"region 2 vanishes\" or \"page 3 of region 2 vanishes\"",
    ),
];

impl Script {
    /// Reads a script. Lines and semicolons end a rule, and # begins a comment.
    ///
    /// # Errors
    /// The first [`ScriptError`].
    pub fn parse(text: &str) -> Result<Self, ScriptError> {
        let mut script = Self::default();
        // Editors of some systems put a byte order mark in front.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        for (n, line) in text.lines().enumerate() {
            let before = script.rules.len();
            let line_number = u32::try_from(n + 1).unwrap_or(u32::MAX);
            let line = line.split('#').next().unwrap_or_default();
            let mut column = 1_u32;
            for part in line.split(';') {
                let words = Words::new(line_number, column, part);
                let chars = u32::try_from(part.chars().count()).unwrap_or(u32::MAX);
                column = column.saturating_add(chars).saturating_add(1);
                if !words.is_empty() {
                    script.add(line_number, part.trim(), words)?;
                }
            }
            let of_line = &mut script.rules[before..];
            if of_line.len() > 1 {
                of_line.iter_mut().zip(1..).for_each(|(rule, n)| rule.of_line = Some(n));
            }
        }
        Ok(script)
    }

    /// The text of a script without its seed. Blanks take its place, so lines and columns stay.
    #[must_use]
    pub fn without_seed(text: &str) -> String {
        let is_seed = |rule: &str| {
            let word = rule.split_whitespace().next();
            word.is_some_and(|word| word.eq_ignore_ascii_case("seed"))
        };
        let blank = |rule: &str| match is_seed(rule) {
            true => " ".repeat(rule.chars().count()),
            false => rule.to_owned(),
        };
        let line = |line: &str| {
            let rules = line.split('#').next().unwrap_or_default();
            rules.split(';').map(blank).collect::<Vec<_>>().join(";")
        };
        text.lines().map(line).collect::<Vec<_>>().join("\n")
    }

    fn add(&mut self, line: u32, text: &str, mut words: Words<'_>) -> Result<(), ScriptError> {
        if words.take(&["seed"]) {
            if self.seed.is_some() {
                return Err(words.refuse_last("the script has a seed already"));
            }
            self.seed = Some(words.value("a number", seed)?);
            return words.end("the end of the rule");
        }
        let place = place(&mut words)?;
        let fault = fault(&mut words, &place)?;
        let hides = |earlier: &Rule| {
            let hides = earlier.hides(Duration::ZERO, &place, &fault);
            let does = hides.or_else(|| earlier.repeats(&place, &fault))?;
            Some((earlier.line, does))
        };
        if let Some((line, does)) = self.rules.iter().find_map(hides) {
            return Err(words.refuse_last(format!(
                "line {line} {does} already, and the first rule decides: put the narrower rule first, or leave one out"
            )));
        }
        let (text, fired) = (text.to_owned(), Fired::default());
        self.rules.push(Rule { line, of_line: None, text, added: false, place, fault, fired });
        Ok(())
    }
}

/// `on device NAME port 1 qp 3 peer 10.0.0.2:`
fn place(words: &mut Words<'_>) -> Result<Place, ScriptError> {
    let mut place = Place::default();
    if !words.take(&["on"]) {
        return Ok(place);
    }
    if words.take(&["device"]) {
        let name = |word: &str| (word != ":").then(|| word.to_owned());
        place.device = Some(words.read("the name of a device", name)?);
        if words.take(&["port"]) {
            let port = |word: &str| word.parse().ok().filter(|port| (1..=2).contains(port));
            place.port = Some(words.read("1 or 2, for no device has more ports", port)?);
        }
    }
    if words.take(&["qp"]) {
        let expected = "the place of a queue pair in the order in which they are made, from 1, or its number with 0x in front";
        place.qp = Some(words.value(expected, qp_name)?);
    }
    if words.take(&["peer"]) {
        place.peer = Some(words.address("an IP address, such as 10.0.0.2 or fe80::1")?);
    }
    if place == Place::default() {
        return Err(words.error("\"device\", \"qp\" or \"peer\""));
    }
    words.expect(&[":"])?;
    Ok(place)
}

fn fault(words: &mut Words<'_>, place: &Place) -> Result<Fault, ScriptError> {
    let action = |word: &str| {
        Some(match word.to_ascii_lowercase().as_str() {
            "drop" => PacketAction::Drop,
            "duplicate" => PacketAction::Duplicate,
            "reorder" => PacketAction::Reorder,
            "corrupt" => PacketAction::Corrupt,
            "delay" => PacketAction::Delay(Duration::ZERO, Duration::ZERO),
            "limit" => PacketAction::Limit(Limit { rate: 0, queue: None }),
            "mark" => PacketAction::Mark,
            "rnr" => PacketAction::NotReady,
            _ => return None,
        })
    };
    if let Some(action) = words.read_if(action) {
        return packets(words, action);
    }
    if place.peer.is_some() {
        return Err(words.refuse("a peer is a place for rules about packets: leave \"peer\" out"));
    }
    if words.take(&["down"]) {
        no_queue_pair(words, place, "a port")?;
        return Ok(Fault::Down(span(words)?));
    }
    if words.take(&["event"]) {
        no_queue_pair(words, place, "a port")?;
        let expected = format!("one of the events {}", names::events());
        let event = words.read(&expected, PortEvent::find)?;
        return Ok(Fault::Event(event, moment(words)?));
    }
    if words.take(&["gid"]) {
        no_queue_pair(words, place, "a port")?;
        let index = words.value("the place of a GID in its table, from 0", gid_index)?;
        words.expect(&["removed"])?;
        return Ok(Fault::Gid(index, span(words)?));
    }
    for (word, fault) in
        [("fatal", Fault::Fatal as fn(Duration) -> Fault), ("removed", Fault::Removed)]
    {
        if words.take(&[word]) {
            no_queue_pair(words, place, "a device")?;
            if place.port.is_some() {
                return Err(
                    words.refuse_last("a device fails with all its ports: leave \"port\" out")
                );
            }
            return Ok(fault(moment(words)?));
        }
    }
    if words.take(&["fails", "fail"]) {
        return Ok(Fault::Fails(QpFailure::Err, moment(words)?));
    }
    if words.take(&["goes", "go"]) {
        words.expect(&["to"])?;
        let state = |word: &str| match word.to_ascii_uppercase().as_str() {
            "SQE" => Some(QpFailure::Sqe),
            "ERR" => Some(QpFailure::Err),
            _ => None,
        };
        let state = words.read("SQE, the error of the send queue, or ERR", state)?;
        return Ok(Fault::Fails(state, moment(words)?));
    }
    if words.take(&["process"]) {
        if *place != Place::default() {
            return Err(words.refuse_last(
                "the process is more than a device or queue pair: leave \"on ...:\" out",
            ));
        }
        return process(words);
    }
    let is_it = |(known, _): &&(&str, &str)| {
        words.peek().is_some_and(|word| known.eq_ignore_ascii_case(word))
    };
    if let Some((_, hint)) = HINTS.iter().find(is_it) {
        return Err(words.refuse(*hint));
    }
    let chance = match words.value_if(chance)? {
        Some(parts) => {
            words.expect(&["of"])?;
            Some(parts)
        }
        None => None,
    };
    if words.take(&["send", "sends"]) {
        return work(words, chance, false);
    }
    if words.take(&["receive", "receives"]) {
        return work(words, chance, true);
    }
    if words.take(&["page", "pages"]) {
        let pages = numbers(words, chance)?;
        words.expect(&["of"])?;
        words.expect(&["region", "regions"])?;
        return memory(words, place, pages, None);
    }
    if words.take(&["region", "regions"]) {
        return memory(words, place, Which::All, chance);
    }
    let Some(call) = words.read_if(names::call) else {
        let is_call =
            words.peek().is_some_and(|word| word.starts_with("ibv_") || word.starts_with("rdma_"));
        return Err(match (is_call, chance) {
            (true, _) => words.error(&format!("one of the calls {}", names::CALLS.join(", "))),
            (_, Some(_)) => words.error("sends, receives, pages, regions, or the name of a call"),
            _ => words.error(A_FAULT),
        });
    };
    if *place != Place::default() {
        return Err(words
            .refuse_last("a call is no affair of a device or queue pair: leave \"on ...:\" out"));
    }
    let which = numbers(words, chance)?;
    let site = site(words)?;
    let action = call_action(words)?;
    let span = span(words)?;
    Ok(Fault::Call { call, site, which, action, span })
}

/// `from setup`, `from libucp.so.0+0x1234`, `from object libucp.so.0`.
fn site(words: &mut Words<'_>) -> Result<Option<Site>, ScriptError> {
    if !words.take(&["from"]) {
        return Ok(None);
    }
    let site = if words.take(&["object"]) {
        let name = |word: &str| Site::object(word, None).filter(|_| word != ":");
        words.read("the file of an object without a directory, such as libucp.so.0", name)?
    } else {
        words.read(
            "the name of a function, FILE+0xOFFSET without a directory, or \"object\"",
            Site::find,
        )?
    };
    if words.peek() == Some(":") {
        return Err(words.refuse("of a name with \"::\" write the last part alone"));
    }
    Ok(Some(site))
}

/// `vanish after 1s for 2s`, behind the regions.
fn memory(
    words: &mut Words<'_>,
    place: &Place,
    pages: Which,
    chance: Option<u32>,
) -> Result<Fault, ScriptError> {
    if place.qp.is_some() || place.port.is_some() {
        return Err(words.refuse_last(
            "memory is of a device, with all its ports and queue pairs: leave \"port\" and \"qp\" out",
        ));
    }
    let regions = numbers(words, chance)?;
    words.expect(&["vanishes", "vanish"])?;
    let span = span(words)?;
    Ok(Fault::Memory { pages, regions, span })
}

/// `fails with ENOMEM`, `kills the process`, `pauses the process for 2s`.
fn call_action(words: &mut Words<'_>) -> Result<CallAction, ScriptError> {
    if words.take(&["kills", "kill"]) {
        words.expect(&["the"])?;
        words.expect(&["process"])?;
        return Ok(CallAction::Process(ProcessAction::Dies));
    }
    if words.take(&["pauses", "pause"]) {
        words.expect(&["the"])?;
        words.expect(&["process"])?;
        words.expect(&["for"])?;
        return Ok(CallAction::Process(ProcessAction::Pauses(words.value(A_TIME, time)?)));
    }
    if !words.take(&["fails", "fail"]) {
        return Err(words.error("\"fails\", \"kills\" or \"pauses\""));
    }
    words.expect(&["with"])?;
    let expected = format!("one of the error numbers {}, or 1 to 4095", names::errnos());
    Ok(CallAction::Fails(words.read(&expected, Errno::find)?))
}

/// `dies after 1s`, `pauses for 2s after 1s`.
fn process(words: &mut Words<'_>) -> Result<Fault, ScriptError> {
    if words.take(&["dies"]) {
        return Ok(Fault::Process(ProcessAction::Dies, moment(words)?));
    }
    words.expect(&["dies", "pauses"])?;
    let span = span(words)?;
    let Some(lasts) = span.lasts else { return Err(words.error("\"for\" and a time")) };
    Ok(Fault::Process(ProcessAction::Pauses(lasts), span.after))
}

/// `packet 5`, `packets 5 to 9`, `1% of received ack packets`, and what follows them.
fn packets(words: &mut Words<'_>, mut action: PacketAction) -> Result<Fault, ScriptError> {
    use PacketKind as K;
    let chance = words.value_if(chance)?;
    if chance.is_some() {
        words.expect(&["of"])?;
    }
    let received = direction(words, action)?;
    let kind = words.read_if(|word| {
        Some(match word.to_ascii_lowercase().as_str() {
            "request" => PacketKind::Request,
            "send" => PacketKind::Send,
            "write" => PacketKind::Write,
            "read" => PacketKind::Read,
            "atomic" => PacketKind::Atomic,
            "response" => PacketKind::Response,
            "ack" => PacketKind::Ack,
            _ => PacketKind::Single(Opcode::find(word)?),
        })
    });
    let of = match kind {
        Some(K::Single(opcode)) => opcode.kind(),
        kind => kind,
    };
    let takes_receive = kind.is_none() || matches!(of, Some(K::Request | K::Send | K::Write));
    if action == PacketAction::NotReady && !takes_receive {
        return Err(words.refuse_last("only send and write packets ask for a receive"));
    }
    if !words.take(&["packet", "packets"]) {
        if let Some(word) = words.peek().filter(|word| kind.is_none() && Opcode::is_meant(word)) {
            return Err(words.error(&format!("one of the opcodes {}", Opcode::names_near(word))));
        }
        let kinds = if kind.is_some() {
            ""
        } else {
            ", or a kind of them: request, send, write, read, atomic, response, ack, or an opcode such as RC_SEND_ONLY"
        };
        return Err(words.error(&format!("\"packets\"{kinds}")));
    }
    let which = numbers(words, chance)?;
    match &mut action {
        PacketAction::Delay(least, most) => delay(words, least, most)?,
        PacketAction::Limit(limit) => {
            words.expect(&["to"])?;
            limit.rate = words.value("a rate such as 10Gb/s or 500Mb/s", rate)?;
            if words.take(&["queue"]) {
                limit.queue = Some(words.value(A_NUMBER, queue)?);
            }
        }
        _ => {}
    }
    let span = span(words)?;
    Ok(Fault::Packets { action, received, kind, which, span })
}

/// A place in a GID table.
fn gid_index(word: &str) -> Option<Result<usize, String>> {
    let is_number = word.bytes().all(|byte| byte.is_ascii_digit());
    let in_table = |index: &usize| *index < MOST_GIDS;
    let refused = || format!("a GID table has the places 0 to {}", MOST_GIDS - 1);
    is_number.then(|| word.parse().ok().filter(in_table).ok_or_else(refused))
}

/// A number of packets that wait.
fn queue(word: &str) -> Option<Result<u64, String>> {
    let refused = || format!("a queue has room for 1 to {MOST_WAITING} packets");
    let fits = |n: &u64| *n <= MOST_WAITING;
    number(word).map(|n| n.ok().filter(fits).ok_or_else(refused))
}

/// `received` or `sent`, where the action allows it. True: received.
fn direction(words: &mut Words<'_>, action: PacketAction) -> Result<bool, ScriptError> {
    use PacketAction as A;
    let received = words.take(&["received"]);
    let of_arrivals = match action {
        A::Corrupt => Some("a packet is found corrupt where it arrives"),
        A::Mark => Some("a mark is seen where the packet arrives"),
        A::NotReady => Some("a packet finds no receive where it arrives"),
        _ => None,
    };
    match (received, of_arrivals) {
        (false, Some(reason)) => Err(words.error(&format!("\"received\", for {reason}"))),
        (true, None) if !matches!(action, A::Drop | A::Duplicate) => Err(words.refuse_last(
            "received packets can be dropped, duplicated, corrupted, marked, or find no receive; the sender's script delays, reorders and limits them",
        )),
        (true, _) => Ok(true),
        (false, None) => {
            words.take(&["sent"]);
            Ok(false)
        }
    }
}

/// `by 1ms to 5ms`
fn delay(
    words: &mut Words<'_>,
    least: &mut Duration,
    most: &mut Duration,
) -> Result<(), ScriptError> {
    words.expect(&["by"])?;
    *least = words.value(A_TIME, time)?;
    *most = *least;
    if words.take(&["to"]) {
        *most = words.value(A_TIME, time)?;
        if most < least {
            return Err(words.refuse_last("the longest delay is shorter than the shortest"));
        }
    }
    Ok(())
}

/// The number behind a thing that is counted, or the chance that stood before it.
fn numbers(words: &mut Words<'_>, chance: Option<u32>) -> Result<Which, ScriptError> {
    if let Some(parts) = chance {
        return Ok(Which::Chance(parts));
    }
    let Some(first) = words.value_if(number)? else { return Ok(Which::All) };
    if !words.take(&["to"]) {
        return Ok(Which::Numbers(first, first));
    }
    let last = words.value(A_NUMBER, number)?;
    if last < first {
        return Err(
            words.refuse_last(format!("the last number is smaller than the first, {first}"))
        );
    }
    Ok(Which::Numbers(first, last))
}

fn work(words: &mut Words<'_>, chance: Option<u32>, receives: bool) -> Result<Fault, ScriptError> {
    let which = numbers(words, chance)?;
    let span = times(words)?;
    if words.take(&["never"]) {
        words.expect(&["completes", "complete"])?;
        words.end("the end of the rule")?;
        return Ok(Fault::Work { action: WorkAction::Never, receives, which, span });
    }
    if !words.take(&["completes", "complete"]) {
        let times = if span == Span::default() { "\"after\", \"for\", " } else { "" };
        return Err(words.error(&format!("{times}\"completes\" or \"never completes\"")));
    }
    let mut status = None;
    if words.take(&["with"]) {
        if let Some(reason) = words.peek().and_then(Status::why_not) {
            return Err(words.refuse(reason));
        }
        let has = |status: &Status| !receives || status.of_peer().is_some();
        let expected = match receives {
            true => format!("one of the statuses of receives {}", names::statuses_of_receives()),
            false => format!("one of the statuses {}", names::statuses()),
        };
        status = Some(words.read(&expected, |word| Status::find(word).filter(has))?);
    }
    let late = match words.take(&["after"]) {
        true => Some(words.value(A_TIME, time)?),
        false => None,
    };
    words.end("\"after\", or the end of the rule")?;
    let action = match (status, late) {
        (Some(status), late) => WorkAction::Fails(status, late.unwrap_or_default()),
        (None, Some(late)) => WorkAction::Late(late),
        (None, None) => return Err(words.error("\"with\" or \"after\"")),
    };
    Ok(Fault::Work { action, receives, which, span })
}

/// `after 5s for 2s`, in either order, and nothing behind them.
fn span(words: &mut Words<'_>) -> Result<Span, ScriptError> {
    let span = times(words)?;
    words.end("\"after\", \"for\", or the end of the rule")?;
    Ok(span)
}

/// `after 5s for 2s`, in either order.
fn times(words: &mut Words<'_>) -> Result<Span, ScriptError> {
    let (mut after, mut lasts) = (None, None);
    loop {
        if after.is_none() && words.take(&["after"]) {
            after = Some(words.value(A_TIME, time)?);
        } else if lasts.is_none() && words.take(&["for"]) {
            lasts = Some(words.value(A_TIME, time)?);
        } else {
            return Ok(Span { after: after.unwrap_or_default(), lasts });
        }
    }
}

/// `after 5s`, and nothing behind it.
fn moment(words: &mut Words<'_>) -> Result<Duration, ScriptError> {
    words.expect(&["after"])?;
    let after = words.value(A_TIME, time)?;
    words.end("the end of the rule")?;
    Ok(after)
}

fn no_queue_pair(words: &Words<'_>, place: &Place, what: &str) -> Result<(), ScriptError> {
    if place.qp.is_none() {
        return Ok(());
    }
    Err(words.refuse_last(format!("this is a fault of {what}: leave \"qp\" out")))
}
