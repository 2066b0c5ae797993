//! The words of a rule, and where each stands.

use std::net::IpAddr;
use std::time::Duration;

use crate::QpName;
use crate::parse::ScriptError;

/// A word, in a line of a script.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Word<'a> {
    pub(crate) text: &'a str,
    /// Its first character, from 1.
    column: u32,
}

/// The words of a rule that are still to be read.
#[derive(Clone, Debug)]
pub(crate) struct Words<'a> {
    line: u32,
    words: Vec<Word<'a>>,
    at: usize,
    /// The column behind the last word.
    end: u32,
}

/// No rule is about a longer time.
const LONGEST: Duration = Duration::from_secs(100 * 24 * 3600);

impl<'a> Words<'a> {
    /// The words of `text`, which begins at a column of a line. A colon is a word of its own.
    pub(crate) fn new(line: u32, column: u32, text: &'a str) -> Self {
        let mut words = Vec::new();
        let (mut begin, mut count) = (None, column);
        let mut begin_column = column;
        let mut end = column;
        let mut push = |from: usize, to: usize, at: u32| {
            words.push(Word { text: &text[from..to], column: at });
        };
        for (at, c) in text.char_indices() {
            if c.is_whitespace() || c == ':' {
                if let Some(from) = begin.take() {
                    push(from, at, begin_column);
                }
                if c == ':' {
                    push(at, at + 1, count);
                }
            } else if begin.is_none() {
                (begin, begin_column) = (Some(at), count);
            }
            count = count.saturating_add(1);
            if !c.is_whitespace() {
                end = count;
            }
        }
        if let Some(from) = begin {
            push(from, text.len(), begin_column);
        }
        Self { line, words, at: 0, end }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// The next word.
    pub(crate) fn peek(&self) -> Option<&'a str> {
        self.words.get(self.at).map(|word| word.text)
    }

    /// Reads the next word if it is one of these.
    pub(crate) fn take(&mut self, wanted: &[&str]) -> bool {
        let is_it =
            self.peek().is_some_and(|word| wanted.iter().any(|w| w.eq_ignore_ascii_case(word)));
        self.at += usize::from(is_it);
        is_it
    }

    /// Reads the next word, which must be one of these.
    pub(crate) fn expect(&mut self, wanted: &[&str]) -> Result<(), ScriptError> {
        if self.take(wanted) {
            return Ok(());
        }
        let names: Vec<_> = wanted.iter().map(|word| format!("\"{word}\"")).collect();
        Err(self.error(&names.join(" or ")))
    }

    /// Reads a word that `read` understands.
    pub(crate) fn read<T>(
        &mut self,
        expected: &str,
        read: impl FnOnce(&'a str) -> Option<T>,
    ) -> Result<T, ScriptError> {
        let found = self.peek().and_then(read).ok_or_else(|| self.error(expected))?;
        self.at += 1;
        Ok(found)
    }

    /// Reads a word that `read` understands, if it is there.
    pub(crate) fn read_if<T>(&mut self, read: impl FnOnce(&'a str) -> Option<T>) -> Option<T> {
        let found = self.peek().and_then(read)?;
        self.at += 1;
        Some(found)
    }

    /// Reads an IP address. Colons are words of their own, but for those in it. One behind it ends the place of a rule.
    pub(crate) fn address(&mut self, expected: &str) -> Result<IpAddr, ScriptError> {
        let rest = &self.words[self.at..];
        let is_next = |(one, next): (&Word<'_>, &Word<'_>)| {
            one.column as usize + one.text.chars().count() == next.column as usize
        };
        let joined = rest.iter().zip(rest.iter().skip(1)).take_while(|pair| is_next(*pair)).count();
        // The longest text that is one: what comes behind it may follow without a blank.
        for count in (1..=(joined + 1).min(rest.len())).rev() {
            let text: String = rest[..count].iter().map(|word| word.text).collect();
            if let Ok(address) = text.parse::<IpAddr>() {
                self.at += count;
                return Ok(address.to_canonical());
            }
        }
        Err(self.error(expected))
    }

    /// Reads a value, which has a range.
    pub(crate) fn value<T>(
        &mut self,
        expected: &str,
        read: impl FnOnce(&'a str) -> Option<Result<T, String>>,
    ) -> Result<T, ScriptError> {
        self.value_if(read)?.ok_or_else(|| self.error(expected))
    }

    /// Reads a value, which has a range, if it is there.
    pub(crate) fn value_if<T>(
        &mut self,
        read: impl FnOnce(&'a str) -> Option<Result<T, String>>,
    ) -> Result<Option<T>, ScriptError> {
        let Some(word) = self.peek() else { return Ok(None) };
        let found = read(word).transpose();
        let found = found.map_err(|range| self.refuse(format!("{range}, not {}", shown(word))))?;
        self.at += usize::from(found.is_some());
        Ok(found)
    }

    /// Nothing else may follow.
    pub(crate) fn end(&self, expected: &str) -> Result<(), ScriptError> {
        if self.at < self.words.len() { Err(self.error(expected)) } else { Ok(()) }
    }

    /// The next word is not what it should be.
    pub(crate) fn error(&self, expected: &str) -> ScriptError {
        let found = match self.peek() {
            Some(word) => format!("\"{}\"", shown(word)),
            None => "the end of the rule".into(),
        };
        self.refuse(format!("expected {expected}, found {found}"))
    }

    /// A fault at the next word.
    pub(crate) fn refuse(&self, reason: impl Into<String>) -> ScriptError {
        let column = self.words.get(self.at).map_or(self.end, |word| word.column);
        ScriptError { line: self.line, column, reason: reason.into() }
    }

    /// As [`refuse`](Self::refuse), at the word before.
    pub(crate) fn refuse_last(&self, reason: impl Into<String>) -> ScriptError {
        let before = Self { at: self.at.saturating_sub(1), ..self.clone() };
        before.refuse(reason)
    }
}

/// A word that is quoted: its begin, if it is long.
fn shown(word: &str) -> String {
    const MOST: usize = 60;
    let more = if word.chars().nth(MOST).is_some() { "..." } else { "" };
    word.chars().take(MOST).flat_map(char::escape_debug).collect::<String>() + more
}

/// A count, from 1. An inner error says what its range is.
pub(crate) fn number(word: &str) -> Option<Result<u64, String>> {
    let refused = || format!("a number is from 1 to {}", u64::MAX);
    is_whole(word).then(|| word.parse().ok().filter(|n| *n > 0).ok_or_else(refused))
}

/// A queue pair: `3`, or `0x30af32`.
pub(crate) fn qp_name(word: &str) -> Option<Result<QpName, String>> {
    let Some(digits) = word.strip_prefix("0x").or_else(|| word.strip_prefix("0X")) else {
        return Some(number(word)?.map(QpName::Nth));
    };
    let is_number = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_hexdigit());
    let found = u32::from_str_radix(digits, 16).ok().filter(|n| (1..1 << 24).contains(n));
    let refused = || "the number of a queue pair is from 0x1 to 0xffffff".to_owned();
    is_number.then(|| found.map(QpName::Number).ok_or_else(refused))
}

/// The number with which random choices begin.
pub(crate) fn seed(word: &str) -> Option<Result<u64, String>> {
    let refused = |_| format!("a seed is a number from 0 to {}", u64::MAX);
    is_whole(word).then(|| word.parse().map_err(refused))
}

/// A chance such as `0.1%`, in parts of a million.
pub(crate) fn chance(word: &str) -> Option<Result<u32, String>> {
    let percent: f64 = decimal(word.strip_suffix('%')?)?;
    let parts = (percent * 10_000.0).round();
    let is_one = (1.0..=1e6).contains(&parts);
    Some(if is_one { Ok(parts as u32) } else { Err("a chance is from 0.0001% to 100%".into()) })
}

/// A time such as `10ms`.
pub(crate) fn time(word: &str) -> Option<Result<Duration, String>> {
    let unit = word.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    let value = decimal(&word[..word.len() - unit.len()])?;
    let seconds = match unit {
        "s" => value,
        "ms" => value / 1e3,
        "us" => value / 1e6,
        _ => return None,
    };
    let time = Duration::try_from_secs_f64(seconds).ok().filter(|time| *time <= LONGEST);
    Some(time.ok_or_else(|| format!("a time is from 0s to {}s, 100 days", LONGEST.as_secs())))
}

/// A rate such as `10Gb/s`, in bits a second.
pub(crate) fn rate(word: &str) -> Option<Result<u64, String>> {
    let unit = word.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    let value = decimal(&word[..word.len() - unit.len()])?;
    let bits = match unit {
        "Gb/s" | "Gbit/s" => value * 1e9,
        "Mb/s" | "Mbit/s" => value * 1e6,
        "kb/s" | "kbit/s" | "Kb/s" | "Kbit/s" => value * 1e3,
        _ if unit.ends_with("B/s") => {
            let bits = unit.replace('B', "b");
            return Some(Err(format!("a rate is in bits: write {}{bits}", value * 8.0)));
        }
        _ => return None,
    };
    let is_one = (1e3..=1e12).contains(&bits);
    Some(if is_one { Ok(bits as u64) } else { Err("a rate is from 1kb/s to 1000Gb/s".into()) })
}

fn is_whole(word: &str) -> bool {
    !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit())
}

/// A number without sign or exponent.
fn decimal(text: &str) -> Option<f64> {
    let is_plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    text.parse().ok().filter(|_| is_plain)
}
