//! Text of a mail about alarms (RFC 5322, MIME).

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use godwit_api::control::{AlarmChange, AlarmNotice};
use godwit_planner::words::Count;

/// Most notices of one mail: many alarms at once are few mails.
pub(super) const MOST_NOTICES: usize = 50;
/// Characters of a line of encoded text (RFC 2045, section 6.8).
const LINE_CHARS: usize = 76;
/// Bytes of an encoded word in a header: it then has at most 75 characters (RFC 2047, section 2).
const WORD_BYTES: usize = 45;
const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// Returns a mail about these notices, which are at least one.
pub(super) fn message(from: &str, to: &[String], notices: &[AlarmNotice]) -> String {
    let id = notices.last().map_or_else(String::new, |last| {
        format!("{}.{}.{}", last.alarm.id, last.change.name(), last.unix_ms)
    });
    let domain = from.rsplit('@').next().unwrap_or("localhost");
    let unix_ms = notices.last().map_or(0, |last| last.unix_ms);
    let headers = [
        format!("From: {from}"),
        format!("To: {}", to.join(",\r\n ")),
        format!("Subject: {}", encoded(&subject(notices))),
        format!("Date: {}", date(unix_ms)),
        format!("Message-ID: <{id}@{domain}>"),
        "Auto-Submitted: auto-generated".to_owned(),
        "MIME-Version: 1.0".to_owned(),
        "Content-Type: text/plain; charset=utf-8".to_owned(),
        "Content-Transfer-Encoding: base64".to_owned(),
    ];
    format!("{}\r\n\r\n{}\r\n", headers.join("\r\n"), lines(&body(notices)))
}

fn subject(notices: &[AlarmNotice]) -> String {
    match notices {
        [one] => format!("[godwit] {}: {}", what(one), one.alarm.text),
        all => {
            let raised = all.iter().filter(|one| one.change == AlarmChange::Raised).count();
            let count = Count(all.len(), "change");
            format!("[godwit] {count} of alarms, {raised} raised")
        }
    }
}

/// Names a change: `critical alarm`, `cleared`.
fn what(notice: &AlarmNotice) -> String {
    match notice.change {
        AlarmChange::Raised => format!("{} alarm", notice.alarm.severity.name()),
        AlarmChange::Changed => format!("alarm is {} now", notice.alarm.severity.name()),
        other => other.name().to_owned(),
    }
}

fn body(notices: &[AlarmNotice]) -> String {
    let mut text = String::new();
    for notice in notices {
        let alarm = &notice.alarm;
        let mut rows = vec![
            format!("{}: {}", what(notice), alarm.text),
            format!("  object: {}", alarm.object),
            format!("  time:   {}", date(notice.unix_ms)),
        ];
        if !matches!(notice.change, AlarmChange::Cleared) {
            rows.push(format!("  remedy: {}", alarm.remedy));
        }
        if let Some(by) = &alarm.acknowledged {
            let note = if by.note.is_empty() { String::new() } else { format!(": {}", by.note) };
            rows.push(format!("  acknowledged by {}{note}", by.by));
        }
        rows.push(format!("  alarm:  {} ({})", alarm.id, alarm.kind.name()));
        text.push_str(&rows.join("\r\n"));
        text.push_str("\r\n\r\n");
    }
    if let Some(notice) = notices.first() {
        text.push_str("-- \r\nmanager ");
        text.push_str(&notice.manager);
        text.push_str("\r\n");
    }
    text
}

/// Encodes the text of a header as encoded words. A line break in it stays inside them.
fn encoded(text: &str) -> String {
    let mut words = Vec::new();
    let mut word = String::new();
    for char in text.chars() {
        if word.len() + char.len_utf8() > WORD_BYTES {
            words.push(std::mem::take(&mut word));
        }
        word.push(char);
    }
    words.push(word);
    let encoded = words.iter().map(|word| format!("=?UTF-8?B?{}?=", STANDARD.encode(word)));
    encoded.collect::<Vec<_>>().join("\r\n ")
}

/// Encodes a body in lines.
fn lines(text: &str) -> String {
    let encoded = STANDARD.encode(text);
    let lines: Vec<String> = encoded
        .as_bytes()
        .chunks(LINE_CHARS)
        .map(|line| String::from_utf8_lossy(line).into_owned())
        .collect();
    lines.join("\r\n")
}

/// Formats a time as in a header: `Fri, 27 Nov 2026 14:42:50 +0000`.
fn date(unix_ms: u64) -> String {
    let seconds = unix_ms / 1000;
    let days = seconds / 86_400;
    let (year, month, day) = civil(days);
    let weekday =
        usize::try_from(days % 7).ok().and_then(|day| DAYS.get(day)).copied().unwrap_or("Thu");
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{weekday}, {day:02} {month} {year} {hour:02}:{minute:02}:{second:02} +0000")
}

/// Returns year, month and day of a day since 1970, in the Gregorian calendar.
fn civil(days: u64) -> (u64, &'static str, u64) {
    // Years that begin in March have the leap day at their end (Howard Hinnant, "chrono-compatible
    // low-level date algorithms", civil_from_days).
    let from_march_0000 = days + 719_468;
    let (era, of_era) = (from_march_0000 / 146_097, from_march_0000 % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = (from_march + 2) % 12;
    let year = year_of_era + era * 400 + u64::from(month < 2);
    let name =
        usize::try_from(month).ok().and_then(|month| MONTHS.get(month)).copied().unwrap_or("Jan");
    (year, name, day)
}

#[cfg(test)]
mod tests {
    use godwit_api::control::{Alarm, AlarmKind, AlarmSeverity};
    use proptest::prelude::*;

    use super::*;

    fn notice(text: &str) -> AlarmNotice {
        AlarmNotice {
            change: AlarmChange::Raised,
            manager: "m1".to_owned(),
            unix_ms: 1_795_790_570_253,
            alarm: Alarm {
                id: "a1".to_owned(),
                kind: AlarmKind::HostAway,
                severity: AlarmSeverity::Critical,
                object: "host:a".to_owned(),
                text: text.to_owned(),
                remedy: "check its power".to_owned(),
                raised_unix_ms: 1_795_790_570_253,
                cleared_unix_ms: None,
                acknowledged: None,
            },
        }
    }

    /// Returns the headers and the decoded body.
    fn read(message: &str) -> (String, String) {
        let (headers, body) = message.split_once("\r\n\r\n").unwrap();
        let body: String = body.split_whitespace().collect();
        (headers.to_owned(), String::from_utf8(STANDARD.decode(body).unwrap()).unwrap())
    }

    fn decoded(words: &str) -> String {
        let words = words.split("\r\n ").map(|word| {
            assert!(word.len() <= 75, "{word}");
            let text = word.strip_prefix("=?UTF-8?B?").unwrap().strip_suffix("?=").unwrap();
            String::from_utf8(STANDARD.decode(text).unwrap()).unwrap()
        });
        words.collect()
    }

    #[test]
    fn a_mail_has_what_an_operator_needs() {
        let to = ["a@x.example".to_owned(), "b@x.example".to_owned()];
        let mail = message("g@y.example", &to, &[notice("host a is away")]);
        let (headers, body) = read(&mail);
        assert!(headers.starts_with("From: g@y.example\r\nTo: a@x.example,\r\n b@x.example\r\n"));
        assert!(headers.contains("\r\nDate: Fri, 27 Nov 2026 14:42:50 +0000\r\n"), "{headers}");
        assert!(headers.contains("<a1.raised.1795790570253@y.example>"), "{headers}");
        for part in ["critical alarm: host a is away", "check its power", "host:a", "manager m1"] {
            assert!(body.contains(part), "{body}");
        }
        let two = message("g@y.example", &to, &[notice("one"), notice("two")]);
        let subject = two.split_once("Subject: ").unwrap().1.split_once("\r\nDate").unwrap().0;
        assert_eq!(decoded(subject), "[godwit] 2 changes of alarms, 2 raised");
        assert!(read(&two).1.contains("one") && read(&two).1.contains("two"));
    }

    #[test]
    fn days_are_those_of_the_calendar() {
        for (unix_s, expected) in [
            (0, "Thu, 01 Jan 1970 00:00:00 +0000"),
            (951_782_400, "Tue, 29 Feb 2000 00:00:00 +0000"),
            (951_868_800, "Wed, 01 Mar 2000 00:00:00 +0000"),
            (4_107_542_399, "Sun, 28 Feb 2100 23:59:59 +0000"),
            (4_107_542_400, "Mon, 01 Mar 2100 00:00:00 +0000"),
        ] {
            assert_eq!(date(unix_s * 1000), expected);
        }
    }

    proptest! {
        #[test]
        fn no_text_becomes_a_header_or_a_long_line(
            text in "\\PC{0,40}[\r\n.äß€]{0,9}\\PC{0,90}",
        ) {
            let mail = message("g@y.example", &["a@x.example".to_owned()], &[notice(&text)]);
            prop_assert!(mail.is_ascii());
            prop_assert!(mail.split("\r\n").all(|line| line.len() <= 120 && line != "."));
            let (headers, _) = read(&mail);
            let names: Vec<&str> =
                headers.split("\r\n").filter(|line| !line.starts_with(' ')).collect();
            prop_assert_eq!(names.len(), 9);
            let subject =
                mail.split_once("Subject: ").unwrap().1.split_once("\r\nDate").unwrap().0;
            let expected = format!("[godwit] critical alarm: {text}");
            prop_assert_eq!(decoded(subject), expected);
        }
    }
}
