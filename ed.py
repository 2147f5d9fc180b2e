import sys,re
def wrap(line,width=100):
    m=re.match(r'^(\s*)(///|//!|//) ?(.*)$',line)
    if not m or len(line)<=width: return [line]
    ind,pre,txt=m.groups()
    hang=''
    mm=re.match(r'^(\s*)([-*]|\d+\.) ',txt)
    lead=re.match(r'^\s*',txt).group()
    if mm: hang=' '*len(mm.group())
    elif lead: hang=lead
    words=txt.split(' ')
    # keep `code spans` and [links] whole
    toks=[];buf=''
    for w in txt.strip().split(' '):
        buf=(buf+' '+w) if buf else w
        if buf.count('`')%2==0: toks.append(buf);buf=''
    if buf: toks+=buf.split(' ')
    out=[];cur=ind+pre+' '+lead
    first=True;empty=True
    for t in toks:
        cand=cur+('' if empty else ' ')+t
        if len(cand)>width and not empty:
            out.append(cur); cur=ind+pre+' '+hang+t
        else: cur=cand
        empty=False
    out.append(cur); return out
def brk(line,width=100):
    # break a long string literal with backslash
    if len(line)<=width or line.strip().startswith('//'): return [line]
    # find literals
    for m in re.finditer(r'(?<![r#\w])(b?)"((?:[^"\\]|\\.)*)"?',line):
        a,b=m.start(),m.end()
        if b<=width-0 and b<len(line): 
            pass
        if a>=width: continue
        if b<width-2 and b<len(line)-3: continue
        cut=line.rfind(' ',a+2,width-1)
        if cut<0 or cut<=a+1: continue
        ind=len(line)-len(line.lstrip())
        cont=ind if line.lstrip().startswith('"') else ind+4
        first=line[:cut+1]+'\\'
        rest=' '*cont+line[cut+1:]
        # rest is inside a string
        out=[first]
        while len(rest)>width:
            e=re.search(r'(?<!\\)"',rest)
            lim=width-1
            c=rest.rfind(' ',cont+1,lim)
            if c<=cont: break
            if e and c>e.start(): break
            out.append(rest[:c+1]+'\\'); rest=' '*cont+rest[c+1:]
        out.append(rest)
        return out
    return [line]
if __name__=='__main__':
    if sys.argv[1]=='auto':
        for p in sys.argv[2:]:
            L=open(p).read().split('\n'); o=[]
            for l in L: o+=brk(l)
            if o!=L: open(p,'w').write('\n'.join(o))
        sys.exit()
    edits={};path=None;cur=None
    for raw in open(sys.argv[1]).read().split('\n'):
        if raw.startswith('@@ '): path=raw[3:].strip();edits.setdefault(path,[]);cur=None;continue
        m=re.match(r'^=(\d+)(?:-(\d+))?(?:\s*(.*))?$',raw)
        if m:
            cur=[int(m[1]),int(m[2] or m[1]),[]]
            if m[3]: cur[2].append(m[3])
            edits[path].append(cur);continue
        if cur is not None: cur[2].append(raw)
    for p,es in edits.items():
        L=open(p).read().split('\n')
        es.sort(key=lambda e:-e[0])
        lastA=10**9
        for a,b,t in es:
            assert b<lastA and a>=1 and b<=len(L),(p,a,b)
            lastA=a
            while t and t[-1]=='': t.pop()
            ind=re.match(r' *',L[a-1]).group()
            # guard: comment edits must replace only comment lines
            new=[]
            allc=all(x.strip().startswith('//') for x in t)
            if allc and t:
                for k in range(a-1,b):
                    assert L[k].strip().startswith('//') ,(p,a,b,k+1,L[k])
            if not t:
                for k in range(a-1,b):
                    assert L[k].strip().startswith('//') ,(p,a,b,L[k])
            for x in t:
                x=ind+x if x.strip() else x
                if x.strip()=='//!' or x.strip()=='///': x=x.rstrip()
                if x.strip().startswith('//'): new+=wrap(x)
                else: new+=brk(x)
            L[a-1:b]=new
        open(p,'w').write('\n'.join(L))
    print('ok')
